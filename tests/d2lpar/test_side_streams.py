import torch
from held import held, run_what_is_ready

import d2lpar
from d2lpar import Timeline
from d2lpar.side_streams import receive, send, wait_until_sent

NUMEL = 500  # 0.1 s over the link of these tests


def sent_ones(here, there):
    """Send ones, with the link held, and return the message."""
    return send(torch.ones(NUMEL, device=here), torch.zeros(NUMEL, device=there))


def test_between_tensors_of_one_device_and_to_the_cpu_it_is_a_plain_copy():
    (device,) = d2lpar.virtual_gpus(1)
    for target in (device, "cpu"):
        into = torch.zeros(3, device=target)
        message = send(torch.ones(3, device=device), into)
        assert receive(message) is into and into.tolist() == [1, 1, 1]
        wait_until_sent(message)


def test_both_devices_go_on_while_a_tensor_is_under_way():
    here, there = d2lpar.virtual_gpus(2, peer_link=20_000)
    with Timeline() as timeline, held():
        message = sent_ones(here, there)
        for device in (here, there):
            with timeline.mark(f"{device}"):
                torch.ones(3, device=device)
            run_what_is_ready(device)
        total = receive(message).sum()
    assert total.item() == NUMEL
    d2lpar.virtual_gpus(2)
    [copy] = timeline.select(kind="copy")
    for device in (here, there):
        [kernel] = timeline.select(device, "kernel", mark=f"{device}")
        assert kernel.end < copy.end
    [reads] = timeline.select(there, "kernel", name="sum")
    assert copy.end <= reads.start


def test_messages_into_a_device_follow_each_other_and_so_do_those_out_of_it():
    hub, *others = d2lpar.virtual_gpus(3, peer_link=100_000)
    for pairs in ([(other, hub) for other in others], [(hub, other) for other in others]):
        with Timeline() as timeline:
            messages = [sent_ones(*pair) for pair in pairs]
            assert [receive(message).sum().item() for message in messages] == [NUMEL] * 2
        first, second = timeline.select(kind="copy", engine="p2p")
        assert first.end <= second.start
    with Timeline() as timeline, held(2):  # but a device sends and receives at the same time
        messages = [sent_ones(*pair) for pair in (others, others[::-1])]
    for message in messages:
        receive(message)
    first, second = timeline.select(kind="copy", engine="p2p")
    assert max(first.start, second.start) < min(first.end, second.end)
    d2lpar.virtual_gpus(3)


def test_what_has_left_may_be_written_to():
    here, there = d2lpar.virtual_gpus(2, peer_link=20_000)
    tensor = torch.ones(NUMEL, device=here)
    with Timeline() as timeline, held():
        wait_until_sent(send(tensor, torch.zeros(NUMEL, device=there)))
        with timeline.mark("later"):
            tensor.zero_()
        run_what_is_ready(here)
    d2lpar.virtual_gpus(2)
    [copy] = timeline.select(kind="copy")
    [later] = timeline.select(here, "kernel", mark="later")
    assert copy.end <= later.start


def test_what_is_sent_and_dropped_keeps_its_memory_until_it_has_left():
    here, there = d2lpar.virtual_gpus(2, peer_link=20_000)
    before = torch.vgpu.memory_stats(here)["active_bytes.all.current"]
    with held():
        message = sent_ones(here, there)
        assert torch.vgpu.memory_stats(here)["active_bytes.all.current"] >= before + 4 * NUMEL
    assert receive(message).sum().item() == NUMEL
    d2lpar.virtual_gpus(2)
    assert torch.vgpu.memory_stats(here)["active_bytes.all.current"] == before


def test_what_is_sent_does_not_arrive_while_its_memory_is_in_use():
    """What the receiver still computes may read or write the memory that it was given."""
    here, there = d2lpar.virtual_gpus(2)
    other = torch.ones(NUMEL, device=here)
    sending, receiving = torch.vgpu.Stream(here), torch.vgpu.Stream(there)
    with Timeline() as timeline, held():
        with torch.vgpu.device(there):
            torch.vgpu._sleep(0.1)
        with timeline.mark("sent"):
            sent_ones(here, there)
        with torch.vgpu.stream(sending), torch.vgpu.stream(receiving):
            other.to(there, non_blocking=True)  # runs after what was ready before
        receiving.record_event().synchronize()
    [sleep] = timeline.select(there, "kernel", name="sleep")
    [copy] = timeline.select(here, "copy", mark="sent")
    assert sleep.end <= copy.start
