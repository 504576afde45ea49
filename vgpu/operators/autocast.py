"""`torch.autocast("vgpu", ...)`: the precision of operators.

The lists are CUDA's (PyTorch documentation, "Autocast Op Reference").
"""

import torch

from vgpu.private.dispatch import below_autocast, tree_leaves
from vgpu.tensors.tensor import VirtualTensor

LOWER_PRECISION = """
    matmul mm bmm mv addmm addmv addr addbmm baddbmm chain_matmul linalg_multi_dot linalg_vecdot
    conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d.input conv_transpose3d.input
    convolution _convolution linear prelu scaled_dot_product_attention
    lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell
""".split()
FLOAT32 = """
    acos asin cosh sinh tan erfinv exp expm1 log log10 log1p log2 reciprocal rsqrt
    pow.Tensor_Scalar pow.Tensor_Tensor pow.Scalar softplus layer_norm rms_norm group_norm
    cosine_similarity cosine_embedding_loss cdist pdist dist renorm logsumexp nll_loss nll_loss2d
    nll_loss_nd hinge_embedding_loss kl_div l1_loss smooth_l1_loss huber_loss mse_loss
    margin_ranking_loss multilabel_margin_loss multi_margin_loss soft_margin_loss
    triplet_margin_loss poisson_nll_loss binary_cross_entropy_with_logits
    prod prod.dim_int cumsum cumprod sum sum.dim_IntList softmax.int log_softmax.int
    norm.Scalar norm.ScalarOpt_dim norm.ScalarOpt_dtype norm.ScalarOpt_dim_dtype frobenius_norm.dim
    nuclear_norm nuclear_norm.dim linalg_vector_norm linalg_matrix_norm linalg_matrix_norm.str_ord
    upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_linear1d upsample_bilinear2d
    upsample_bicubic2d upsample_trilinear3d _upsample_bilinear2d_aa _upsample_bicubic2d_aa
    _upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d
""".split()
WIDEST = """
    addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put scatter_add tensordot
""".split()


def register(library):
    """Register the casts of all operators in a `torch.library.Library`."""
    for names, choose in (
        (LOWER_PRECISION, lambda arguments: torch.get_autocast_dtype("vgpu")),
        (FLOAT32, lambda arguments: torch.float32),
        (WIDEST, _widest),
    ):
        for name in names:
            packet, _, overload = name.partition(".")
            func = getattr(getattr(torch.ops.aten, packet), overload or "default")
            library.impl(name, _casting(func, choose), _KEY)
    library.impl("binary_cross_entropy", _refuse_binary_cross_entropy, _KEY)


_KEY = "AutocastPrivateUse1"


def _widest(arguments):
    dtypes = {leaf.dtype for leaf in tree_leaves(arguments) if type(leaf) is VirtualTensor}
    return torch.float32 if torch.float32 in dtypes else torch.get_autocast_dtype("vgpu")


def _cast(value, dtype):
    if type(value) is VirtualTensor:
        if value.is_floating_point() and value.dtype not in (torch.float64, dtype):
            return value.to(dtype)
        return value
    if isinstance(value, (list, tuple)):
        return type(value)(_cast(item, dtype) for item in value)
    return value


def lower(tensors):
    """Return a tuple of tensors in autocast's lower precision."""
    return _cast(tensors, torch.get_autocast_dtype("vgpu"))


def _casting(func, choose):
    def kernel(*args, **kwargs):
        with below_autocast():
            if kwargs.get("dtype") is None:
                args = _cast(args, choose(args))  # no keyword argument is a tensor
            return func(*args, **kwargs)

    return kernel


def _refuse_binary_cross_entropy(*args, **kwargs):
    raise RuntimeError(
        "torch.nn.functional.binary_cross_entropy and torch.nn.BCELoss are unsafe to autocast: "
        "use binary_cross_entropy_with_logits or BCEWithLogitsLoss"
    )
