"""The op that writes new keys and values into a cache, in place."""

from __future__ import annotations

import torch
from torch import Tensor

from ._errors import AttentionChecks, AttentionSetupError
from ._ops import add_op_namespace_prefix, ops

library = torch.library.Library(ops.name, "FRAGMENT")
library.define(
    "append_to_cache(Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor k, Tensor v, Tensor cache_seqlens, "
    "Tensor? block_table) -> ()"
)

_FUNCTION = "flash_attn_with_kvcache"
_CHECKS = AttentionChecks(_FUNCTION, anywhere=True)
_A_PLACE_FOR_EACH = "have a place of its own for each element, unlike an expanded tensor, for new keys to be written"


def _append(
    k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, cache_seqlens: Tensor, block_table: Tensor | None
) -> None:
    """Writes row i of sequence b at position `cache_seqlens[b] + i`; a sequence of negative length is left out.

    On a CPU nothing is written if a position has no place. Elsewhere that would have to wait for the device, so such
    rows are left out.
    """
    tensors = {"k_cache": k_cache, "v_cache": v_cache, "k": k, "v": v, "cache_seqlens": cache_seqlens}
    for name, tensor in tensors.items():
        _CHECKS.memory(name, tensor)
    if block_table is not None:
        _CHECKS.memory("block_table", block_table)
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        if not _is_without_overlap(cache):
            _CHECKS.fail(name, _A_PLACE_FOR_EACH, cache.stride())
    if k_cache.numel() > 0 and v_cache.numel() > 0 and k_cache.data_ptr() == v_cache.data_ptr():
        _CHECKS.fail("v_cache", "be other memory than k_cache, for new keys and values to be written there", v_cache)
    batch, count = k.shape[:2]
    positions = cache_seqlens.long()[:, None] + torch.arange(count, device=k.device)
    wanted = (cache_seqlens >= 0)[:, None].expand(batch, count)
    size = k_cache.shape[1]
    if block_table is None:
        outer = torch.arange(batch, device=k.device)[:, None].expand(batch, count)
        valid = wanted & (positions < size)
    else:
        pages = positions.clamp(min=0) // size
        columns = block_table.shape[1]
        outer = block_table.long().gather(1, pages.clamp(max=max(columns - 1, 0))) if columns else pages
        valid = wanted & (pages < columns) & (outer >= 0) & (outer < k_cache.shape[0])
    slots = (outer * size + positions % max(size, 1)).where(valid, 0)
    if k.device.type == "cpu":
        _require_places(wanted, valid, slots)
    rows = slots[valid] if k.device.type == "cpu" else None
    for cache, new in ((k_cache, k), (v_cache, v)):
        if rows is not None:
            cache[rows // size, rows % size] = new[valid]
        elif cache.shape[0] * size > 0:
            _write_without_waiting(cache, new.flatten(0, 1), slots.flatten(), valid.flatten())


def _is_without_overlap(cache: Tensor) -> bool:
    """Tells whether each element has memory of its own, as in every view that no axis was expanded or unfolded in."""
    if cache.is_contiguous() or cache.numel() == 0:
        return True
    extent = 1
    for stride, size in sorted(zip(cache.stride(), cache.shape, strict=True)):
        if size > 1:
            if stride < extent:
                return False
            extent += (size - 1) * stride
    return True


def _require_places(wanted: Tensor, valid: Tensor, slots: Tensor) -> None:
    if not torch.equal(wanted, valid):
        sequence = int((wanted & ~valid).any(1).int().argmax())
        raise AttentionSetupError(
            f"{_FUNCTION}: cache_seqlens and block_table must give each new key a place in the cache, got none for "
            f"sequence {sequence}"
        )
    written = slots[valid]
    if written.unique().numel() != written.numel():
        raise AttentionSetupError(
            f"{_FUNCTION}: block_table must give each new key a place of its own, got one place for two of them"
        )


def _write_without_waiting(cache: Tensor, new: Tensor, slots: Tensor, valid: Tensor) -> None:
    """Writes the valid rows; the others write once more what the first valid one does, or what is there already."""
    size = cache.shape[1]
    first = valid.int().argmax()
    slots = slots.where(valid, slots[first])
    there = cache[slots[first] // size, slots[first] % size]
    spare = new[first].where(valid.any(), there)
    rows = new.where(valid[:, None, None], spare)
    cache[slots // size, slots % size] = rows


def _fake(
    k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, cache_seqlens: Tensor, block_table: Tensor | None
) -> None:
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        if any(stride == 0 and size > 1 for stride, size in zip(cache.stride(), cache.shape, strict=True)):
            _CHECKS.fail(name, _A_PLACE_FOR_EACH, cache.stride())


library.impl("append_to_cache", _append, "CompositeExplicitAutograd")
torch.library.register_fake(add_op_namespace_prefix("append_to_cache"), _fake)

append_to_cache_op = ops.append_to_cache.default
