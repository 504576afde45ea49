"""Ignite's distributed guide: `idist.Parallel`, and a trainer made of events."""

import ignite.distributed as idist
import torch
import torch.nn.functional as F
from ignite.engine import Events, create_supervised_trainer
from tiny import LR, dataset, network, report


def train(local_rank):
    device = idist.device()
    loader = idist.auto_dataloader(dataset(), batch_size=8, shuffle=False)
    model = idist.auto_model(network())
    optimizer = idist.auto_optim(torch.optim.AdamW(model.parameters(), lr=LR))
    trainer = create_supervised_trainer(model, optimizer, F.cross_entropy, device=device)
    losses = []

    @trainer.on(Events.ITERATION_COMPLETED)
    def note(engine):
        losses.append(idist.all_reduce(engine.state.output) / idist.get_world_size())

    trainer.run(loader, max_epochs=2)
    report(losses)


if __name__ == "__main__":
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    with idist.Parallel(backend=backend) as parallel:
        parallel.run(train)
