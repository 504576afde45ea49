"""Fused attention: `scaled_dot_product_attention` as one kernel, where torch has one for the GPU.

On CUDA torch selects flash attention, which requires 16-bit numbers and Ampere or later,
"efficient" attention, which supports masks and float32, too, or the plain operators; see
aten/src/ATen/native/transformers/cuda/sdp_utils.cpp. Virtual GPUs select in the same way, except
for conditions on addresses and padding. The fused kernels store one number for each row of scores,
so their memory grows with the length, not with its square.

Shapes: queries (N, H, L, E), keys (N, H', S, E), values (N, H', S, D), bias (N, H, L, S).
"""

import torch

from vgpu.operators.plans import aten, tables
from vgpu.tensors.cells import CPU, META
from vgpu.tensors.tensor import VirtualTensor

_cpu_kernel = aten._scaled_dot_product_flash_attention_for_cpu.default


def attend(
    query,
    key,
    value,
    attn_mask=None,
    dropout_p=0.0,
    is_causal=False,
    *,
    scale=None,
    enable_gqa=False,
):
    """Issue `scaled_dot_product_attention` on virtual GPUs; see torch's function of this name.

    Raises RuntimeError, as on CUDA, if no kernel that the program allows supports it.
    """
    mask, gqa = attn_mask, enable_gqa
    given = [x for x in (query, key, value, mask) if x is not None]
    dtypes = {x.dtype for x in given[:3]}
    dtypes |= {x.dtype for x in given[3:]} - {torch.bool, torch.float32}
    if len(dtypes) > 1 or any(x.dim() < 2 for x in given[:3]):
        metas = [torch.empty(x.shape, dtype=x.dtype, device=META) for x in given]
        return aten.scaled_dot_product_attention.default(*metas)  # raises torch's error
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(~mask, -torch.inf)
    kind = _choose(query, key, value, mask, dropout_p, is_causal, gqa)
    if kind == "flash":
        return _flash_kernel(query, key, value, dropout_p, is_causal, False, scale=scale)[0]
    if kind == "efficient":
        bias = None if mask is None else mask.expand(*query.shape[:3], key.shape[2])
        keeps = torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value))
        rest = bias, keeps, dropout_p, is_causal
        return _efficient_kernel(query, key, value, *rest, scale=scale)[0]
    math = aten._scaled_dot_product_attention_math.default
    return math(query, key, value, mask, dropout_p, is_causal, scale=scale, enable_gqa=gqa)[0]


def _choose(query, key, value, mask, dropout_p, is_causal, gqa):
    """Return "flash", "efficient" or "math"."""
    backends = torch.backends.cuda
    tensors = query, key, value
    if all(type(x) is VirtualTensor and x.dim() == 4 and x.numel() for x in tensors) and (
        _are_alike(*tensors, gqa) and 0 <= dropout_p < 1
    ):
        half = query.dtype in (torch.float16, torch.bfloat16)
        width = max(x.shape[3] for x in tensors)
        flash = half and mask is None and width <= 256 and _is_from_ampere_on(query)
        flash = flash and query.shape[3] == value.shape[3]
        flash = flash and not (is_causal and query.shape[2] != key.shape[2])
        if flash and backends.flash_sdp_enabled():
            return "flash"
        known = half or query.dtype == torch.float32
        known = known and (query.dtype != torch.bfloat16 or _is_from_ampere_on(query))
        bias_is_fixed = mask is None or not mask.requires_grad and type(mask) is VirtualTensor
        bias_is_fixed = bias_is_fixed and (mask is None or mask.dtype == query.dtype)
        if known and bias_is_fixed and not gqa and backends.mem_efficient_sdp_enabled():
            return "efficient"
    if not backends.math_sdp_enabled() and type(query) is VirtualTensor:
        raise RuntimeError(
            "No available kernel. Aborting execution. The kernels that sdpa_kernel allows do not "
            f"support queries {tuple(query.shape)} of {query.dtype}"
            + (" with a mask" if mask is not None else "")
        )
    return "math"


def _are_alike(query, key, value, gqa):
    """Return whether the shapes match without broadcasting, except for the heads of GQA."""
    heads, groups = query.shape[1], key.shape[1]
    return (
        (query.shape[0], query.shape[3]) == (key.shape[0], key.shape[3])
        and key.shape[:3] == value.shape[:3]
        and (heads % groups == 0 if gqa else heads == groups)
    )


def _is_from_ampere_on(tensor):
    """Return whether the GPU of a tensor supports bfloat16, as all from Ampere on."""
    model = tensor._cell.layout.device.model
    return "bfloat16" in getattr(model and model.gpu, "peaks", ("bfloat16",))


# -- the two kernels, and their backwards, on CPU tensors


def _flash(
    query, key, value, dropout_p=0.0, is_causal=False, debug=False, *, generator, scale=None
):
    seed = _seed(generator)
    out = _attention(query, key, value, None, dropout_p, is_causal, scale, seed)
    return _results_of_flash(query, key, out, seed)


def _flash_shape(query, key, value, *args, scale=None):
    return _results_of_flash(query, key, _like_flash(query, value), _seed_like(query))


def _results_of_flash(query, key, out, seed):
    empty = query.new_empty(0), query.new_empty(0)
    return out, _sums(query), None, None, query.shape[2], key.shape[2], seed, *empty


def _flash_backward(grad, query, key, value, out, sums, *rest, scale=None):
    """Return the gradients; `rest` is lengths (4), dropout_p, is_causal, seed and offset."""
    dropout_p, is_causal, seed = rest[4:7]
    return _gradients(grad, query, key, value, None, dropout_p, is_causal, scale, seed)


def _efficient(
    query, key, value, bias, keeps, dropout_p=0.0, is_causal=False, *, generator, scale=None
):
    seed = _seed(generator)
    out = _attention(query, key, value, bias, dropout_p, is_causal, scale, seed)
    return out, _sums(query, keeps), seed, query.new_empty((), dtype=torch.int64)


def _efficient_shape(query, key, value, bias, keeps, *args, scale=None):
    seeds = _seed_like(query), _seed_like(query)
    return _like_flash(query, value), _sums(query, keeps), *seeds


def _efficient_backward(
    grad, query, key, value, bias, out, sums, seed, _, dropout_p, mask, is_causal=False, scale=None
):
    grads = _gradients(grad, query, key, value, bias, dropout_p, is_causal, scale, seed)
    return *grads, grad.new_empty(0)  # no gradient of the bias


def _shapes_of_gradients(grad, query, key, value, *args, scale=None):
    return tuple(map(torch.empty_like, (query, key, value)))


def _efficient_backward_shape(grad, query, key, value, *args, scale=None):
    return *_shapes_of_gradients(grad, query, key, value), grad.new_empty(0)


def _seed(generator):
    """Return the seed of the kernel, from which dropout draws the same numbers as the CPU."""
    seed = generator.initial_seed()
    return torch.tensor(seed - 2**64 if seed >= 2**63 else seed, device=CPU)


def _seed_like(query):
    return query.new_empty((), dtype=torch.int64)


def _like_flash(query, value):
    """Return an empty result, in memory (N, L, H, D), so that joining the heads needs no copy."""
    n, heads, length, _ = query.shape
    return query.new_empty(n, length, heads, value.shape[3]).transpose(1, 2)


def _sums(query, keeps=True):
    return query.new_empty(*query.shape[:2], query.shape[2] if keeps else 0, dtype=torch.float32)


def _attention(query, key, value, bias, dropout_p, is_causal, scale, seed):
    """Return the result; dropout draws from the seed, so that backward can repeat it."""
    groups = query.shape[1] // key.shape[1]
    if dropout_p == 0 and query.shape[3] == value.shape[3]:
        if groups > 1:
            key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
        # not `scaled_dot_product_attention`: it would obey the host's current sdpa_kernel
        query, key, value = (x if x.stride(3) == 1 else x.contiguous() for x in (query, key, value))
        out = _cpu_kernel(query, key, value, 0.0, is_causal, attn_mask=bias, scale=scale)[0]
    else:
        *_, v, _, weights, kept = _weights(
            query, key, value, bias, dropout_p, is_causal, scale, seed
        )
        out = (weights * kept) @ v
    return _like_flash(query, value).copy_(out)


def _weights(query, key, value, bias, dropout_p, is_causal, scale, seed):
    """Return the tensors of both passes, in float32.

    Returns:
        Queries, keys and values, with H heads each; the scale of the scores; the weights
        (N, H, L, S), and the factors of dropout for them.
    """
    groups = query.shape[1] // key.shape[1]
    q, k, v = query.float(), *(x.float().repeat_interleave(groups, 1) for x in (key, value))
    scale = query.shape[3] ** -0.5 if scale is None else scale
    scores = q @ k.transpose(2, 3) * scale
    if bias is not None:
        scores += bias
    if is_causal:
        future = torch.ones(scores.shape[2:], dtype=torch.bool, device=CPU).triu(1)
        scores.masked_fill_(future, -torch.inf)
    weights = aten._safe_softmax.default(scores, 3)  # 0 in rows that are masked completely
    kept = torch.ones((), device=CPU)
    if dropout_p:
        generator = torch.Generator().manual_seed(seed.item())
        kept = torch.empty_like(weights).bernoulli_(1 - dropout_p, generator=generator)
        kept /= 1 - dropout_p
    return q, k, v, scale, weights, kept


def _gradients(grad, query, key, value, bias, dropout_p, is_causal, scale, seed):
    q, k, v, scale, weights, kept = _weights(
        query, key, value, bias, dropout_p, is_causal, scale, seed
    )
    grad = grad.float()
    of_value = (weights * kept).transpose(2, 3) @ grad
    of_weights = grad @ v.transpose(2, 3) * kept
    of_scores = weights * (of_weights - (of_weights * weights).sum(3, keepdim=True)) * scale
    grads = of_scores @ k, of_scores.transpose(2, 3) @ q, of_value
    return tuple(
        torch.empty_like(x).copy_(g.unflatten(1, (x.shape[1], -1)).sum(2))
        for x, g in zip((query, key, value), grads, strict=True)
    )


_flash_kernel = aten._scaled_dot_product_flash_attention.default
_efficient_kernel = aten._scaled_dot_product_efficient_attention.default
_flash_grad = aten._scaled_dot_product_flash_attention_backward.default
_efficient_grad = aten._scaled_dot_product_efficient_attention_backward.default
for _kernel, _run, _shape in (
    (_flash_kernel, _flash, _flash_shape),
    (_efficient_kernel, _efficient, _efficient_shape),
    (_flash_grad, _flash_backward, _shapes_of_gradients),
    (_efficient_grad, _efficient_backward, _efficient_backward_shape),
):
    tables.run[_kernel], tables.shape[_kernel] = _run, _shape
tables.random.update((_flash_kernel, _efficient_kernel))


def register(library):
    """Register `attend` for tensors of virtual GPUs in a `torch.library.Library`."""
    for key in ("AutogradPrivateUse1", "PrivateUse1"):
        library.impl("scaled_dot_product_attention", attend, key)


tables.special[aten.scaled_dot_product_attention.default] = lambda func, args, kwargs: attend(
    *args, **kwargs
)
