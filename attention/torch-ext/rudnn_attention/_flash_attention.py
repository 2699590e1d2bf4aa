"""The functions of flash-attention, by whose names and arguments Transformers calls a kernel of the Hub."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from ._attention import MAX_HEAD_DIM, attention
from ._cache import append_to_cache_op
from ._errors import REFUSALS, AttentionChecks, is_zero
from ._options import AttentionOptions, window_bounds

Window = tuple[int, int]


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    s_aux: Tensor | None = None,
) -> Tensor:
    """Returns attention, with the heads behind the tokens.

    Args:
        q: `[B, Sq, Hq, D]`, float32, float16 or bfloat16, any strides.
        k: `[B, Sk, Hkv, D]` of the dtype of q; Hq is a multiple of Hkv.
        v: `[B, Sk, Hkv, Dv]` of the dtype of q.
        dropout_p: 0; nothing is dropped here.
        softmax_scale: what the products are multiplied by, by default `1 / sqrt(D)`.
        causal: whether a query sees no key behind it; the last query is aligned with the last key.
        window_size: `(left, right)`, how far from its position a query sees keys, 0 to 2^31 - 1; -1 for any distance.
        softcap: bounds the scores to `softcap * tanh(score / softcap)`; 0 for no bound.
        alibi_slopes: None; not supported.
        deterministic: ignored: results never change from call to call, once autotune has chosen.
        return_attn_probs: False; not supported.
        s_aux: `[Hq]`, float32 or the dtype of q, one more score for each head, without a value.

    Returns:
        `[B, Sq, Hq, Dv]`, contiguous, of the dtype of q. Differentiable once in q, k, v and s_aux.

    Raises:
        AttentionSetupError: for an argument that is not as described.

    Source: `flash_attn_func` of flash-attention, with the sinks of its version 3 in vLLM.
    """
    check = AttentionChecks("flash_attn_func", anywhere=True)
    _refuse(check, dropout_p, alibi_slopes, return_attn_probs)
    options = _options(check, softmax_scale, causal, window_size, softcap)
    if is_dynamo_compiling():
        _check_batch(check, q, k, v, s_aux)
    try:
        return _attend((q, k, v), None, options, s_aux)
    except REFUSALS:
        _check_batch(check, q, k, v, s_aux)
        raise


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | Tensor,
    max_seqlen_k: int | Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    deterministic: bool = False,
    block_table: Tensor | None = None,
    s_aux: Tensor | None = None,
) -> Tensor:
    """Returns attention within each of the sequences that lie one after the other in one axis.

    On a CPU each sequence is computed by itself. Elsewhere, and in torch.compile, the lengths are not asked of the
    device: all sequences are padded to the longest one.

    Args:
        q: `[Nq, Hq, D]`, float32, float16 or bfloat16, any strides.
        k: `[Nk, Hkv, D]` of the dtype of q; with a block_table `[pages, page_size, Hkv, D]`.
        v: the same with Dv.
        cu_seqlens_q: `[B + 1]`, int32 or int64, contiguous: sequence b has the queries from `cu_seqlens_q[b]` to
            `cu_seqlens_q[b + 1]`. It begins with 0; queries behind its last element get 0.
        cu_seqlens_k: the same of the keys.
        max_seqlen_q: no less than the longest sequence has queries; a tensor of one element does too, but is waited
            for.
        max_seqlen_k: the same of the keys.
        dropout_p: 0; nothing is dropped here.
        softmax_scale: what the products are multiplied by, by default `1 / sqrt(D)`.
        causal: whether a query sees no key behind it; the last query of a sequence is aligned with its last key.
        window_size: `(left, right)`, how far from its position a query sees keys, 0 to 2^31 - 1; -1 for any distance.
        softcap: bounds the scores to `softcap * tanh(score / softcap)`; 0 for no bound.
        deterministic: ignored: results never change from call to call, once autotune has chosen.
        block_table: `[B, columns]`, int32 or int64: the pages of each sequence in k and v, in their order.
        s_aux: `[Hq]`, float32 or the dtype of q, one more score for each head, without a value.

    Returns:
        `[Nq, Hq, Dv]`, contiguous, of the dtype of q. Differentiable once in q, k, v and s_aux.

    Raises:
        AttentionSetupError: for an argument that is not as described; what index tensors hold is looked at on a CPU
            only, outside torch.compile, and compared with max_seqlen_q and max_seqlen_k there.

    Source: `flash_attn_varlen_func` of flash-attention, with the sinks of its version 3 in vLLM.
    """
    check = AttentionChecks("flash_attn_varlen_func", anywhere=True)
    _refuse(check, dropout_p)
    options = _options(check, softmax_scale, causal, window_size, softcap)
    packed = _check_packed(check, q, k, v, cu_seqlens_q, cu_seqlens_k, block_table, s_aux)
    longest = check.length("max_seqlen_q", max_seqlen_q), check.length("max_seqlen_k", max_seqlen_k)
    if q.device.type == "cpu" and not is_dynamo_compiling():
        return _one_by_one(check, packed, longest, options, s_aux)
    return _padded(packed, longest, options, s_aux)


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
) -> Tensor:
    """Writes new keys and values into a cache, in place, and returns attention over what is in there.

    Made for inference: it has no gradient, and asking for one raises.

    Args:
        q: `[B, Sq, Hq, D]`, float32, float16 or bfloat16, any strides.
        k_cache: `[B, capacity, Hkv, D]` of the dtype of q; with a block_table `[pages, page_size, Hkv, D]`. Written to
            where there are new keys: then each element has memory of its own, unlike those of an expanded tensor.
        v_cache: the same with Dv. Where there are new keys it shares no element with k_cache, unless v is k or the
            beginning of its last axis, and v_cache that of k_cache, as in MLA.
        k: `[B, Sn, Hkv, D]` of the dtype of q: new keys, for the positions from `cache_seqlens[b]` on; None for none.
        v: `[B, Sn, Hkv, Dv]`, the values to these.
        cache_seqlens: `[B]`, int32 or int64, or one number for all: the lengths before the new keys. A negative one
            marks a sequence that is not there: nothing is written, and its queries get 0. By default the caches are
            full.
        block_table: `[B, columns]`, int32 or int64: the pages of each sequence in their order; what stands behind those
            that a sequence fills is not looked at.
        softmax_scale: what the products are multiplied by, by default `1 / sqrt(D)`.
        causal: whether a query sees no key behind it; the last query of a sequence is aligned with its last key.
        window_size: `(left, right)`, how far from its position a query sees keys, 0 to 2^31 - 1; -1 for any distance.
        softcap: bounds the scores to `softcap * tanh(score / softcap)`; 0 for no bound.

    Returns:
        `[B, Sq, Hq, Dv]`, contiguous, of the dtype of q.

    Raises:
        AttentionSetupError: for an argument that is not as described. What index tensors hold is looked at on a CPU
            only, before anything is written; elsewhere a key without a place is left out, so that no call waits.

    Source: `flash_attn_with_kvcache` of flash-attention.
    """
    check = AttentionChecks("flash_attn_with_kvcache", anywhere=True)
    options = _options(check, softmax_scale, causal, window_size, softcap)
    _check_cache(check, q, k_cache, v_cache, block_table)
    new = _check_new(check, q, k_cache, v_cache, k, v)
    if new and cache_seqlens is None:
        check.fail("cache_seqlens", "say where the new keys go", cache_seqlens)
    tensors = {"q": q, "k_cache": k_cache, "v_cache": v_cache, "k": k, "v": v}
    for name, tensor in tensors.items():
        if tensor is not None and tensor.requires_grad and torch.is_grad_enabled():
            check.fail(name, "not require a gradient, unless in torch.no_grad()", tensor)
    capacity = k_cache.shape[1] * (1 if block_table is None else block_table.shape[1])
    before = _lengths_before(check, cache_seqlens, capacity, q)
    lengths = (before + new).where(before >= 0, 0)
    longest, all_as_long = capacity, False
    if q.device.type == "cpu" and not is_dynamo_compiling():
        counted = lengths.tolist()
        longest = max(counted, default=0)
        all_as_long = counted.count(longest) == len(counted)
        if longest > capacity:
            check.fail(
                "cache_seqlens", f"be at most {capacity - new}, for {new} new keys to find a place", before.tolist()
            )
        if block_table is not None:
            _check_pages(check, block_table, counted, k_cache)
    if new:
        append_to_cache_op(k_cache, v_cache, k, v, before, block_table)

    keys, values = (_from_cache(cache, block_table, longest) for cache in (k_cache, v_cache))
    mask = None
    if not all_as_long:
        there = None if block_table is None else _there(block_table, k_cache, longest)
        mask = _mask_of_lengths(lengths, q.shape[1], longest, there, options)
        options = AttentionOptions(options.scale, options.softcap)
    return _attend((q, keys, values), mask, options, None)


def _refuse(
    check: AttentionChecks, dropout_p: object, alibi_slopes: object = None, return_attn_probs: object = False
) -> None:
    """Raises AttentionSetupError for what flash-attention has and this does not."""
    if not is_zero(dropout_p):
        check.fail("dropout_p", "be 0: nothing is dropped here", dropout_p)
    if alibi_slopes is not None:
        check.fail("alibi_slopes", "be None: they are not supported", alibi_slopes)
    if return_attn_probs is not False:
        check.fail("return_attn_probs", "be False: probabilities are never in memory", return_attn_probs)


def _options(
    check: AttentionChecks, softmax_scale: object, causal: object, window_size: object, softcap: object
) -> AttentionOptions:
    """Returns the options, with the errors in the words of flash-attention."""
    if is_dynamo_compiling():
        return _checked_options(check, softmax_scale, causal, window_size, softcap)
    try:
        return _known_options(softmax_scale, causal, window_size, softcap)
    except REFUSALS:
        return _checked_options(check, softmax_scale, causal, window_size, softcap)


def _checked_options(
    check: AttentionChecks, softmax_scale: object, causal: object, window_size: object, softcap: object
) -> AttentionOptions:
    check.flag("causal", causal)
    scale = None if softmax_scale is None else check.positive_float32("softmax_scale", softmax_scale)
    cap = None if softcap is None or is_zero(softcap) else check.positive_float32("softcap", softcap)
    window = window_bounds(check, "window_size", window_size)
    return AttentionOptions(scale, cap, bool(causal), None if window == (-1, -1) else window)


@functools.lru_cache(maxsize=256, typed=True)
def _known_options(softmax_scale: object, causal: object, window_size: object, softcap: object) -> AttentionOptions:
    return _checked_options(AttentionChecks("flash_attn"), softmax_scale, causal, window_size, softcap)


def _heads_first(tensor: Tensor) -> Tensor:
    return tensor.transpose(1, 2)


def _tokens_first(output: Tensor) -> Tensor:
    return output.transpose(1, 2).contiguous()


def _attend(tensors: Iterable[Tensor], mask: Tensor | None, options: AttentionOptions, s_aux: Tensor | None) -> Tensor:
    """Returns the output of attention for query, key and value, all with the tokens first."""
    query, key, value = map(_heads_first, tensors)
    output = attention(query, key, value, mask, None, options, sinks=s_aux)
    assert isinstance(output, Tensor)
    return _tokens_first(output)


class _Packed(NamedTuple):
    """Sequences one after the other, checked.

    Attributes:
        queries: `[Nq, Hq, D]`.
        keys: `[Nk, Hkv, D]`, the pages' one after the other if there are pages.
        values: `[Nk, Hkv, Dv]`.
        query_starts: int64 `[B + 1]`.
        key_starts: int64 `[B + 1]`.
        table: the pages of each sequence, int64 `[B, columns]`, or None.
        page_size: of these, or 0.
    """

    queries: Tensor
    keys: Tensor
    values: Tensor
    query_starts: Tensor
    key_starts: Tensor
    table: Tensor | None
    page_size: int

    def key_rows(self, positions: Tensor, table: Tensor | None, starts: Tensor) -> Tensor:
        """Returns the rows of the keys at some positions `[B, n]` of each sequence, all of them within bounds."""
        if table is None:
            rows = starts[:, None] + positions
        else:
            pages = positions.clamp(min=0) // self.page_size
            page = table.gather(1, pages.clamp(max=table.shape[1] - 1))
            rows = page * self.page_size + positions % self.page_size
        return rows.clamp(0, self.keys.shape[0] - 1)


def _one_by_one(
    check: AttentionChecks, packed: _Packed, longest: tuple[int, int], options: AttentionOptions, s_aux: Tensor | None
) -> Tensor:
    """Computes each sequence by itself, with lengths that the host knows."""
    queries, keys, values = packed.queries, packed.keys, packed.values
    query_lengths = _lengths(check, "cu_seqlens_q", packed.query_starts, queries.shape[0])
    key_lengths = _lengths(check, "cu_seqlens_k", packed.key_starts, None if packed.page_size else keys.shape[0])
    _check_longest(check, "max_seqlen_q", longest[0], query_lengths)
    _check_longest(check, "max_seqlen_k", longest[1], key_lengths)
    *query_parts, rest = queries.split([*query_lengths, queries.shape[0] - sum(query_lengths)])
    if packed.table is None:
        sizes = [*key_lengths, keys.shape[0] - sum(key_lengths)]
        pairs = list(zip(keys.split(sizes)[:-1], values.split(sizes)[:-1], strict=True))
    else:
        _check_table(check, packed.table, key_lengths, packed.page_size, keys.shape[0] // packed.page_size)
        pairs = []
        for table, length in zip(packed.table, key_lengths, strict=True):
            rows = packed.key_rows(torch.arange(length)[None], table[None], packed.key_starts)[0]
            pairs.append((keys[rows], values[rows]))
    outputs = [
        _attend((part[None] for part in (query, *pair)), None, options, s_aux)[0]
        for query, pair in zip(query_parts, pairs, strict=True)
    ]
    return torch.cat([*outputs, rest.new_zeros(rest.shape[0], rest.shape[1], values.shape[2])])


def _padded(packed: _Packed, longest: tuple[int, int], options: AttentionOptions, s_aux: Tensor | None) -> Tensor:
    """Computes all sequences at once, each at the end of the longest one's room, without asking the device anything.

    At the end, since the last query is aligned with the last key there too.
    """
    queries, keys, values = packed.queries, packed.keys, packed.values
    batch = packed.query_starts.shape[0] - 1
    query_room, key_room = min(longest[0], queries.shape[0]), longest[1]
    if keys.shape[0] == 0 or (packed.table is not None and packed.table.shape[1] == 0):
        key_room = 0
    if batch == 0 or query_room == 0:
        return queries.new_zeros(*queries.shape[:2], values.shape[2])
    device = queries.device
    query_starts, query_lengths = packed.query_starts[:-1], packed.query_starts.diff()
    query_positions = torch.arange(query_room, device=device) - query_room + query_lengths[:, None]
    query_rows = (query_starts[:, None] + query_positions).clamp(0, queries.shape[0] - 1)
    key_lengths = packed.key_starts.diff()
    key_positions = torch.arange(key_room, device=device) - key_room + key_lengths[:, None]
    key_rows = packed.key_rows(key_positions, packed.table, packed.key_starts[:-1])
    mask = (key_positions >= 0)[:, None, None, :]
    output = _attend((queries[query_rows], keys[key_rows], values[key_rows]), mask, options, s_aux)
    tokens = torch.arange(queries.shape[0], device=device)
    sequence = torch.searchsorted(packed.query_starts[1:], tokens, right=True)
    inside = sequence < batch
    sequence = sequence.clamp(max=batch - 1)
    place = tokens - query_starts[sequence] + query_room - query_lengths[sequence]
    result = output[sequence, place.clamp(0, query_room - 1)]
    return result.where(inside[:, None, None], 0)


def _from_cache(cache: Tensor, block_table: Tensor | None, length: int) -> Tensor:
    """Returns the first rows of each sequence, `[B, length, Hkv, X]`."""
    if block_table is None:
        return cache[:, :length]
    columns = -(-length // cache.shape[1])
    pages = block_table[:, :columns].long().clamp(0, cache.shape[0] - 1)
    return cache[pages].flatten(1, 2)[:, :length]


def _there(block_table: Tensor, cache: Tensor, length: int) -> Tensor:
    """Returns which of the first rows of each sequence are on a page of the cache, bool `[B, length]`."""
    page_size = cache.shape[1]
    columns = -(-length // page_size)
    pages = block_table[:, :columns]
    return ((pages >= 0) & (pages < cache.shape[0])).repeat_interleave(page_size, 1)[:, :length]


def _mask_of_lengths(
    lengths: Tensor, queries: int, keys: int, there: Tensor | None, options: AttentionOptions
) -> Tensor:
    """Returns which key each query sees where sequences end at different places, `[B, 1, Sq or 1, Sk]`."""
    ends = lengths[:, None, None]
    places = torch.arange(keys, device=lengths.device)
    mask = places < ends
    if there is not None:
        mask = mask & there[:, None]
    left, right = options.window or (-1, -1)
    if options.is_causal or left >= 0 or right >= 0:
        positions = ends - queries + torch.arange(queries, device=lengths.device)[:, None]
        if options.is_causal:
            mask = mask & (places <= positions)
        if left >= 0:
            mask = mask & (places >= positions - left)
        if right >= 0:
            mask = mask & (places <= positions + right)
    return mask[:, None]


def _float_tensor(check: AttentionChecks, name: str, value: object, axes: str) -> Tensor:
    tensor = check.float_tensor(name, value)
    check.axes(name, tensor, axes)
    return tensor


def _check_heads(
    check: AttentionChecks, q: Tensor, k: Tensor, v: Tensor, s_aux: object, names: tuple[str, str] = ("k", "v")
) -> None:
    """Raises AttentionSetupError unless dtypes, devices, heads and head_dim go together."""
    heads, width = q.shape[-2:]
    for name, tensor in zip(names, (k, v), strict=True):
        check.dtype_of(name, tensor, "q", q)
        check.device(name, tensor, "q", q)
    for name, tensor in (("q", q), (names[1], v)):
        if not 1 <= tensor.shape[-1] <= MAX_HEAD_DIM:
            check.fail(name, f"have a last axis of 1 to {MAX_HEAD_DIM} elements", tensor)
    if k.shape[-1] != width:
        check.fail(names[0], f"have a last axis of {width} elements, as q has", k)
    if k.shape[-2] < 1 or heads % k.shape[-2] != 0:
        check.fail(names[0], f"have a number of heads that divides the {heads} of q", k)
    if v.shape[:-1] != k.shape[:-1]:
        check.fail(names[1], f"have the axes {tuple(k.shape[:-1])} of {names[0]} before the last", v)
    if s_aux is not None:
        sinks = check.float_tensor("s_aux", s_aux)
        check.dtype("s_aux", sinks, torch.float32, q.dtype)
        check.shape("s_aux", sinks, (heads,))
        check.device("s_aux", sinks, "q", q)


def _check_batch(check: AttentionChecks, q: object, k: object, v: object, s_aux: object) -> None:
    queries = _float_tensor(check, "q", q, "B, Sq, Hq, D")
    keys = _float_tensor(check, "k", k, "B, Sk, Hkv, D")
    values = _float_tensor(check, "v", v, "B, Sk, Hkv, Dv")
    if keys.shape[0] != queries.shape[0]:
        check.fail("k", f"have a first axis of {queries.shape[0]}, as q has", keys)
    _check_heads(check, queries, keys, values, s_aux)


def _check_packed(
    check: AttentionChecks,
    q: object,
    k: object,
    v: object,
    cu_seqlens_q: object,
    cu_seqlens_k: object,
    block_table: object,
    s_aux: object,
) -> _Packed:
    queries = _float_tensor(check, "q", q, "Nq, Hq, D")
    axes = "Nk, Hkv, {}" if block_table is None else "pages, page_size, Hkv, {}"
    keys, values = _float_tensor(check, "k", k, axes.format("D")), _float_tensor(check, "v", v, axes.format("Dv"))
    _check_heads(check, queries, keys, values, s_aux)
    query_starts = _starts(check, "cu_seqlens_q", cu_seqlens_q, queries)
    key_starts = _starts(check, "cu_seqlens_k", cu_seqlens_k, queries)
    if key_starts.shape != query_starts.shape:
        check.fail("cu_seqlens_k", f"have the shape {tuple(query_starts.shape)} of cu_seqlens_q", key_starts)
    if block_table is None:
        return _Packed(queries, keys, values, query_starts.long(), key_starts.long(), None, 0)
    table = _table(check, block_table, query_starts.shape[0] - 1, queries, keys)
    rows = keys.flatten(0, 1), values.flatten(0, 1)
    return _Packed(queries, *rows, query_starts.long(), key_starts.long(), table.long(), keys.shape[1])


def _starts(check: AttentionChecks, name: str, value: object, q: Tensor) -> Tensor:
    tensor = check.integers(name, value)
    check.axes(name, tensor, "B + 1")
    if tensor.shape[0] < 1:
        check.fail(name, "have at least one element", tensor)
    check.device(name, tensor, "q", q)
    return tensor


def _table(check: AttentionChecks, value: object, batch: int, q: Tensor, pages: Tensor) -> Tensor:
    tensor = check.integers("block_table", value)
    check.axes("block_table", tensor, "B, columns")
    if tensor.shape[0] != batch:
        check.fail("block_table", f"have a row for each of the {batch} sequences", tensor)
    check.device("block_table", tensor, "q", q)
    if pages.shape[0] < 1 or pages.shape[1] < 1:
        check.fail("block_table", "be None unless there are pages", tuple(pages.shape))
    return tensor


def _lengths(check: AttentionChecks, name: str, starts: Tensor, rows: int | None) -> list[int]:
    """Returns the lengths of sequences, and requires their starts to be in order and within bounds."""
    values = starts.tolist()
    lengths = [after - before for before, after in itertools.pairwise(values)]
    if values[0] != 0 or min(lengths, default=0) < 0 or (rows is not None and values[-1] > rows):
        end = "" if rows is None else f" and end at most at {rows}"
        check.fail(name, f"begin with 0, never fall{end}", values)
    return lengths


def _check_longest(check: AttentionChecks, name: str, longest: int, lengths: Sequence[int]) -> None:
    """Requires room for each sequence."""
    if longest < max(lengths, default=0):
        check.fail(name, f"be at least {max(lengths)}, the length of the longest sequence", longest)


def _check_table(check: AttentionChecks, table: Tensor, lengths: Sequence[int], page_size: int, pages: int) -> None:
    """Requires a page of the cache wherever a sequence has one."""
    for sequence, (row, length) in enumerate(zip(table.tolist(), lengths, strict=True)):
        used = row[: -(-length // page_size)]
        if len(used) * page_size < length or not all(0 <= page < pages for page in used):
            requirement = f"name pages from 0 to {pages - 1} for the {length} keys of sequence {sequence}"
            check.fail("block_table", requirement, used)


def _check_pages(check: AttentionChecks, table: Tensor, lengths: Sequence[int], cache: Tensor) -> None:
    _check_table(check, table, lengths, cache.shape[1], cache.shape[0])


def _check_cache(check: AttentionChecks, q: object, k_cache: object, v_cache: object, block_table: object) -> None:
    queries = _float_tensor(check, "q", q, "B, Sq, Hq, D")
    axes = "B, capacity, Hkv, {}" if block_table is None else "pages, page_size, Hkv, {}"
    keys = _float_tensor(check, "k_cache", k_cache, axes.format("D"))
    values = _float_tensor(check, "v_cache", v_cache, axes.format("Dv"))
    _check_heads(check, queries, keys, values, None, ("k_cache", "v_cache"))
    if block_table is not None:
        _table(check, block_table, queries.shape[0], queries, keys)
    elif keys.shape[0] != queries.shape[0]:
        check.fail("k_cache", f"have a first axis of {queries.shape[0]}, as q has", keys)


def _check_new(check: AttentionChecks, q: Tensor, k_cache: Tensor, v_cache: Tensor, k: object, v: object) -> int:
    """Returns how many new keys there are for each sequence."""
    if k is None and v is None:
        return 0
    keys = _float_tensor(check, "k", k, "B, Sn, Hkv, D")
    values = _float_tensor(check, "v", v, "B, Sn, Hkv, Dv")
    for name, tensor, cache in (("k", keys, k_cache), ("v", values, v_cache)):
        check.dtype_of(name, tensor, "q", q)
        check.shape(name, tensor, (q.shape[0], keys.shape[1], *cache.shape[2:]))
        check.device(name, tensor, "q", q)
    return keys.shape[1]


def _lengths_before(check: AttentionChecks, value: object, capacity: int, q: Tensor) -> Tensor:
    """Returns how many keys of each sequence were in the cache, int64 `[B]`."""
    if value is None:
        return torch.full((q.shape[0],), capacity, device=q.device)
    if not isinstance(value, Tensor):
        return torch.full((q.shape[0],), check.integer("cache_seqlens", value, -1), device=q.device)
    lengths = check.integers("cache_seqlens", value)
    check.shape("cache_seqlens", lengths, (q.shape[0],))
    check.device("cache_seqlens", lengths, "q", q)
    return lengths.long()
