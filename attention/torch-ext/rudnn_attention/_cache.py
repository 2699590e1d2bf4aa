"""The op that writes new keys and values into a cache, in place."""

from __future__ import annotations

from collections.abc import Callable, Sequence

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
    _check_places(k_cache, v_cache, _is_nested)
    _check_sharing(k_cache, v_cache, k, v)
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


def _check_places(k_cache: Tensor, v_cache: Tensor, is_without_overlap: Callable[[Tensor], bool]) -> None:
    """Requires memory of its own for each element of a cache."""
    for name, new, cache in (("k_cache", "keys", k_cache), ("v_cache", "values", v_cache)):
        if not is_without_overlap(cache):
            requirement = "have strides that give each element a place of its own, unlike those of an expanded tensor"
            _CHECKS.fail(name, f"{requirement}, for new {new} to be written", cache.stride())


def _is_nested(cache: Tensor) -> bool:
    """Tells whether each stride steps over all that the smaller ones reach, so that no two elements share memory.

    So it is in every view that no axis was expanded or unfolded in. Of the layouts that only `as_strided` makes, some
    are without overlap and not nested: shape (2, 3) with strides (3, 2).
    """
    if cache.is_contiguous() or cache.numel() == 0:
        return True
    extent = 1
    for stride, size in sorted(zip(cache.stride(), cache.shape, strict=True)):
        if size > 1:
            if stride < extent:
                return False
            extent += (size - 1) * stride
    return True


def _is_unexpanded(cache: Tensor) -> bool:
    """Tells whether no axis was expanded: all that is asked in a trace, whose strides may be symbols."""
    return all(stride != 0 or size <= 1 for stride, size in zip(cache.stride(), cache.shape, strict=True))


def _check_sharing(k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor) -> None:
    """Requires caches that share no element, unless keys are values too, as in MLA: then both write the same."""
    if _is_same_memory(k, v) and _is_same_memory(k_cache, v_cache):
        return
    if _share_an_element(k_cache, v_cache):
        _CHECKS.fail("v_cache", "share no element with k_cache, unless v and k share all of theirs too", v_cache)


def _is_same_memory(a: Tensor, b: Tensor) -> bool:
    """Tells whether elements of equal indices are the same memory, also if one tensor has a longer axis."""
    return _is_same_storage(a, b) and a.storage_offset() == b.storage_offset() and a.stride() == b.stride()


def _is_same_storage(a: Tensor, b: Tensor) -> bool:
    return a.untyped_storage()._cdata == b.untyped_storage()._cdata


def _share_an_element(a: Tensor, b: Tensor) -> bool:
    """Tells whether two tensors of nested strides share an element; with unequal strides, whether they may."""
    if a.numel() == 0 or b.numel() == 0 or not _is_same_storage(a, b):
        return False
    distance = b.storage_offset() - a.storage_offset()
    axes = [axis for axis in zip(a.stride(), b.stride(), a.shape, b.shape, strict=True) if max(axis[2:]) > 1]
    if any(one != other for one, other, _, _ in axes):
        return -_reach(b) <= distance <= _reach(a)
    return _is_step(distance, sorted(((stride, *sizes) for stride, _, *sizes in axes), reverse=True))


def _reach(tensor: Tensor) -> int:
    """Returns how far behind its first element the last one is."""
    return sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _is_step(distance: int | torch.SymInt, axes: Sequence[tuple[int, ...]]) -> bool:
    """Tells whether two tensors share an element.

    Args:
        distance: how far behind the first element of one tensor that of the other is.
        axes: the stride of both, the one's size and the other's, from the largest stride on. Since strides are nested,
            the smaller ones together make up for less than one step of a larger one.
    """
    if not axes:
        return distance == 0
    (stride, size, other), *smaller = axes
    least = distance // stride
    return any(-other < steps < size and _is_step(distance - steps * stride, smaller) for steps in (least, least + 1))


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
    _check_places(k_cache, v_cache, _is_unexpanded)
    _check_sharing(k_cache, v_cache, k, v)


library.impl("append_to_cache", _append, "CompositeExplicitAutograd")
torch.library.register_fake(add_op_namespace_prefix("append_to_cache"), _fake)

append_to_cache_op = ops.append_to_cache.default
