"""Cells that a kernel executes, and what it shows meanwhile."""

from nbclient import NotebookClient
from nbformat.v4 import new_code_cell, new_notebook

DISPLAYS = ("display_data", "execute_result", "update_display_data", "clear_output")


class ShowingClient(NotebookClient):
    """A client that notes the types of the kernel's messages about displays."""

    def process_message(self, msg, cell, cell_index):
        if msg["msg_type"] in DISPLAYS:
            self.shown.append(msg["msg_type"])
        return super().process_message(msg, cell, cell_index)


def execute(*sources, **options):
    """Execute cells in a new kernel; return the cells and the messages about displays."""
    notebook = new_notebook(cells=[new_code_cell(source) for source in sources])
    client = ShowingClient(notebook, timeout=60, coalesce_streams=True, **options)
    client.shown = []
    client.execute()
    return notebook.cells, client.shown
