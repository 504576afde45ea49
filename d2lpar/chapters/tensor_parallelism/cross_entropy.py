"""The loss of a network whose last layer is split by classes over ranks."""

import torch
import torch.distributed as dist


def split_cross_entropy(outputs, labels, group):
    """Return the mean cross-entropy of logits split by classes over the ranks of a group.

    Ranks exchange three numbers per example: the largest logit, the sum of the exponentials and
    the logit of the label. Backward does not communicate.

    Source: Shoeybi et al. 2019, https://arxiv.org/abs/1909.08053, section 3.

    Args:
        outputs: logits (..., num_classes / world_size) of this rank's classes, in rank order.
        labels: class indices (...), among all classes.
        group: a process group.
    """
    return _SplitCrossEntropy.apply(outputs, labels, group)


class _SplitCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, outputs, labels, group):
        num_classes = outputs.shape[-1]
        labels = labels.unsqueeze(-1) - group.rank() * num_classes
        here = (labels >= 0) & (labels < num_classes)
        labels = labels.clamp(0, num_classes - 1)
        z = outputs.to(torch.promote_types(outputs.dtype, torch.float32), copy=True)
        largest = z.amax(-1, keepdim=True)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
        z -= largest
        chosen = z.gather(-1, labels) * here
        z.exp_()
        both = torch.stack([z.sum(-1, keepdim=True), chosen])
        dist.all_reduce(both, group=group)
        total, chosen = both
        ctx.save_for_backward(z.div_(total), labels, here)  # the softmax
        return (total.log() - chosen).mean()

    @staticmethod
    def backward(ctx, gradient):
        softmax, labels, here = ctx.saved_tensors
        softmax.scatter_add_(-1, labels, -here.to(softmax.dtype))
        return softmax.mul_(gradient / here.numel()), None, None
