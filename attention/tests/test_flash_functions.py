"""The functions with flash-attention's arguments: each is attention in another layout."""

import itertools

import pytest
import torch
from conftest import assert_bits_equal, assert_close_to_exact
from operations import BF16, F16, F32, by_dtype, normal

pytestmark = [pytest.mark.small, pytest.mark.isa_independent]


@pytest.fixture(autouse=True)
def untuned(kernel, monkeypatch):
    """The rule chooses the strategy, so that bits can be compared."""
    monkeypatch.setattr(kernel._autotune, "TUNER", kernel._autotune.Tuner("off", kernel._autotune.measure))


@pytest.fixture(params=[False, True], ids=["lengths_known", "lengths_unknown"])
def lengths_unknown(kernel, monkeypatch, request):
    """Whether the functions may look at what index tensors hold, as on a CPU, or not, as on a GPU."""
    if request.param:
        monkeypatch.setattr(kernel._flash_attention, "is_dynamo_compiling", lambda: True)
    return request.param


OPTIONS = {
    "plain": {},
    "causal": {"causal": True},
    "scale": {"softmax_scale": 0.3},
    "window": {"causal": True, "window_size": (3, 3)},
    "softcap": {"softcap": 2.0},
    "left_window": {"window_size": (2, -1)},
}
by_options = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)


def attention_options(kernel, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0):
    return kernel.AttentionOptions(softmax_scale, softcap or None, causal, window_size)


def tokens(count, heads, width, dtype, device, seed=0, batch=2):
    return normal((batch, count, heads, width), dtype, device=device, seed=seed)


@by_options
@by_dtype
@pytest.mark.parametrize("sinks", [False, True], ids=["", "sinks"])
def test_flash_attn_func(kernel, device, dtype, options, sinks):
    q = tokens(5, 4, 16, dtype, device).requires_grad_()
    k, v = (tokens(9, 2, width, dtype, device, seed).requires_grad_() for width, seed in ((16, 1), (24, 2)))
    s_aux = normal((4,), dtype, device=device, seed=3).requires_grad_() if sinks else None
    output = kernel.flash_attn_func(q, k, v, **options, s_aux=s_aux)
    expected = kernel.attention(
        *(tensor.transpose(1, 2) for tensor in (q, k, v)), options=attention_options(kernel, **options), sinks=s_aux
    ).transpose(1, 2)
    assert output.shape == (2, 5, 4, 24)
    assert output.is_contiguous()
    assert_bits_equal(output.detach(), expected.detach())
    leaves = [q, k, v] + ([s_aux] if sinks else [])
    grad = normal(output.shape, dtype, device=device, seed=5)
    for one, other in zip(torch.autograd.grad(output, leaves, grad), torch.autograd.grad(expected, leaves, grad)):
        assert_bits_equal(one, other)


def packed(lengths, heads, width, dtype, device, seed, spare=0):
    return normal((sum(lengths) + spare, heads, width), dtype, device=device, seed=seed)


def starts(lengths, device, dtype=torch.int32):
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=dtype, device=device)


LENGTHS = {
    "equal": ([4, 4], [4, 4]),
    "ragged": ([5, 1, 70, 3], [5, 4, 80, 2]),
    "empty_ones": ([0, 3, 0, 2], [2, 0, 0, 5]),
    "one": ([6], [6]),
}
by_lengths = pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)


def each_sequence(kernel, q, k, v, lengths, options, s_aux=None):
    """Attention of one sequence after the other."""
    parts = zip(*(t.split([*sizes, len(t) - sum(sizes)])[:-1] for t, sizes in zip((q, k, v), (*lengths, lengths[1]))))
    options = attention_options(kernel, **options)
    outputs = [
        kernel.attention(*(t[None].transpose(1, 2) for t in part), options=options, sinks=s_aux)[0].transpose(0, 1)
        for part in parts
    ]
    return torch.cat([*outputs, q.new_zeros(len(q) - sum(lengths[0]), q.shape[1], v.shape[2])])


@by_lengths
@by_options
@pytest.mark.parametrize("dtype", [F32, BF16], ids=["f32", "bf16"])
def test_flash_attn_varlen_func(kernel, device, lengths_unknown, dtype, options, lengths):
    q = packed(lengths[0], 4, 16, dtype, device, 0).requires_grad_()
    k, v = (packed(lengths[1], 2, w, dtype, device, s).requires_grad_() for w, s in ((16, 1), (24, 2)))
    s_aux = normal((4,), dtype, device=device, seed=3).requires_grad_()
    bounds = starts(lengths[0], device), starts(lengths[1], device)
    output = kernel.flash_attn_varlen_func(q, k, v, *bounds, max(lengths[0]), max(lengths[1]), **options, s_aux=s_aux)
    assert output.shape == (len(q), 4, 24)
    assert output.is_contiguous()
    leaves = q, k, v, s_aux
    grad = normal(output.shape, dtype, device=device, seed=5)
    results = [output, *torch.autograd.grad(output, leaves, grad)]
    plain = each_sequence(kernel, q, k, v, lengths, options, s_aux)
    plain_results = [plain, *torch.autograd.grad(plain, leaves, grad)]
    if not lengths_unknown:
        assert_bits_equal(output.detach(), plain.detach())
    wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
    exact = exact_sequences(kernel, *wide, lengths, options)
    exact_results = [exact, *torch.autograd.grad(exact, wide, grad.double())]
    for one, exact_one, plain_one in zip(results, exact_results, plain_results):
        assert_close_to_exact(one.detach(), exact_one.cpu(), plain_one)


def exact_sequences(kernel, q, k, v, s_aux, lengths, options):
    options = attention_options(kernel, **options)
    parts = zip(*(t.split(sizes) for t, sizes in zip((q, k, v), (*lengths, lengths[1]))))
    outputs = [
        kernel.reference.attention(
            *(t[None].transpose(1, 2) for t in part), options=options, sinks=s_aux, compute_dtype=torch.float64
        )[0][0].transpose(0, 1)
        for part in parts
    ]
    return torch.cat(outputs)


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=["int32", "int64"])
def test_tokens_of_no_sequence_give_0(kernel, device, lengths_unknown, index_dtype):
    """Padding behind the last sequence, whatever it holds."""
    lengths = [3, 2], [4, 5]
    q = packed(lengths[0], 2, 8, F32, device, 0, spare=4)
    k, v = (packed(lengths[1], 2, 8, F32, device, seed, spare=3) for seed in (1, 2))
    expected = each_sequence(kernel, q, k, v, lengths, {"causal": True})
    q[5:], k[9:], v[9:] = torch.nan, torch.nan, torch.nan
    bounds = (starts(each, device, index_dtype) for each in lengths)
    output = kernel.flash_attn_varlen_func(q, k, v, *bounds, 3, 5, causal=True)
    assert not output[5:].any()
    torch.testing.assert_close(output, expected)


def test_the_longest_may_be_a_tensor(kernel, device, lengths_unknown):
    lengths = [3, 2]
    q, k, v = (packed(lengths, 2, 8, F32, device, seed) for seed in range(3))
    bounds = starts(lengths, device)
    longest = torch.tensor(3, device=device)
    output = kernel.flash_attn_varlen_func(q, k, v, bounds, bounds, longest, longest, causal=True)
    torch.testing.assert_close(output, each_sequence(kernel, q, k, v, (lengths, lengths), {"causal": True}))


@by_options
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_varlen_reads_pages(kernel, device, lengths_unknown, options, page_size):
    lengths = [2, 1, 3], [6, 9, 3]
    q = packed(lengths[0], 4, 16, F32, device, 0)
    rows, cache, table = paged(lengths[1], page_size, device)
    bounds = (starts(each, device) for each in lengths)
    output = kernel.flash_attn_varlen_func(q, *cache, *bounds, 3, 9, **options, block_table=table)
    torch.testing.assert_close(output, each_sequence(kernel, q, *rows, lengths, options))


def paged(lengths, page_size, device, dtype=F32, extra_columns=2):
    """Keys and values `[N, 2, 16]`, the same in scattered pages amid NaN, and the table, padded with -1."""
    rows = [packed(lengths, 2, 16, dtype, device, seed) for seed in (11, 12)]
    columns = -(-max(lengths) // page_size) + extra_columns
    needed = [-(-length // page_size) for length in lengths]
    order = torch.randperm(sum(needed) + 3, generator=torch.Generator().manual_seed(4)).tolist()
    table = torch.full((len(lengths), columns), -1, dtype=torch.int32)
    for sequence, count in enumerate(needed):
        for column in range(count):
            table[sequence, column] = order.pop()
    caches = []
    for tensor in rows:
        cache = torch.full((sum(needed) + 3, page_size, 2, 16), torch.nan, dtype=dtype, device=device)
        for sequence, part in enumerate(tensor.split(lengths)):
            for position, row in enumerate(part):
                cache[table[sequence, position // page_size], position % page_size] = row
        caches.append(cache)
    return rows, caches, table.to(device)


def from_rows(kernel, q, rows, lengths, options):
    """Attention of `q [B, Sq, H, D]` over the keys of each sequence."""
    options = attention_options(kernel, **options)
    parts = zip(q, *(tensor.split(lengths) for tensor in rows))
    return torch.cat(
        [kernel.attention(*(t[None].transpose(1, 2) for t in part), options=options).transpose(1, 2) for part in parts]
    )


@by_options
@by_dtype
@pytest.mark.parametrize("layout", ["dense", "pages_of_4", "pages_of_1", "pages_of_16"])
@pytest.mark.parametrize("new", [0, 1, 3])
@pytest.mark.parametrize("queries", [1, 3])
def test_flash_attn_with_kvcache(kernel, device, lengths_unknown, dtype, options, layout, new, queries):
    """What was in the cache, then the new keys, which are there afterwards; nothing else has changed."""
    lengths = [6, 4, 9]
    q = tokens(queries, 4, 16, dtype, device, 5, batch=3)
    if layout == "dense":
        rows = [packed(lengths, 2, 16, dtype, device, seed) for seed in (11, 12)]
        table = None
        caches = [torch.full((3, 12, 2, 16), torch.nan, dtype=dtype, device=device) for _ in rows]
        places = [[(sequence, position) for position in range(n)] for sequence, n in enumerate(lengths)]
        for cache, tensor in zip(caches, rows):
            for place, row in zip(itertools.chain(*places), tensor):
                cache[place] = row
    else:
        page_size = int(layout.rsplit("_")[-1])
        rows, caches, table = paged(lengths, page_size, device, dtype)
        places = [[(int(table[s, p // page_size]), p % page_size) for p in range(n)] for s, n in enumerate(lengths)]
    before = torch.tensor([length - new for length in lengths], dtype=torch.int32, device=device)
    written = [each for s, n in enumerate(lengths) for each in places[s][n - new :]]
    expected_caches = [cache.clone() for cache in caches]
    for cache in caches:
        for place in written:
            cache[place] = torch.nan
    fresh = (
        [torch.stack([part[len(part) - new :] for part in tensor.split(lengths)]) for tensor in rows]
        if new
        else [None, None]
    )
    output = kernel.flash_attn_with_kvcache(q, *caches, *fresh, before, table, **options)
    assert output.shape == (3, queries, 4, 16)
    assert output.is_contiguous()
    for cache, expected in zip(caches, expected_caches):
        assert_bits_equal(cache, expected)
    tolerance = {F32: {}, BF16: {"rtol": 2e-2, "atol": 2e-2}, F16: {"rtol": 2e-3, "atol": 2e-3}}[dtype]
    torch.testing.assert_close(output, from_rows(kernel, q, rows, lengths, options), **tolerance)


def test_one_length_for_all_and_none(kernel, device, lengths_unknown):
    q, k, v = (tokens(count, 2, 8, F32, device, seed) for count, seed in ((1, 0), (6, 1), (6, 2)))
    full = kernel.flash_attn_func(q, k, v, causal=True)
    torch.testing.assert_close(kernel.flash_attn_with_kvcache(q, k, v, causal=True), full)
    some = kernel.flash_attn_func(q, k[:, :4], v[:, :4], causal=True)
    torch.testing.assert_close(kernel.flash_attn_with_kvcache(q, k, v, cache_seqlens=4, causal=True), some)


@pytest.mark.parametrize("layout", ["dense", "paged"])
def test_a_sequence_that_is_not_there(kernel, device, lengths_unknown, layout):
    """A negative length: nothing is read or written, and the queries get 0."""
    q = tokens(1, 2, 16, F32, device, batch=3)
    fresh = [tokens(1, 2, 16, F32, device, seed, batch=3) for seed in (1, 2)]
    if layout == "dense":
        caches, table = [torch.full((3, 4, 2, 16), torch.nan, device=device) for _ in range(2)], None
    else:
        _, caches, table = paged([3, 2, 1], 2, device)
        table[1] = -1
    before = [cache.clone() for cache in caches]
    lengths = torch.tensor([0, -1, 0], device=device)
    output = kernel.flash_attn_with_kvcache(q, *caches, *fresh, lengths, table, causal=True)
    assert not output[1].any()
    for sequence in (0, 2):
        torch.testing.assert_close(output[sequence], fresh[1][sequence])
    for cache, old, new in zip(caches, before, fresh):
        changed = [(sequence, 0) if table is None else (int(table[sequence, 0]), 0) for sequence in (0, 2)]
        for place, sequence in zip(changed, (0, 2)):
            old[place] = new[sequence, 0]
        assert_bits_equal(cache, old)


def test_caches_are_read_wherever_they_lie(kernel, device, lengths_unknown):
    """Expanded ones, and one memory for both, where nothing is written."""
    q, row = tokens(1, 2, 16, F32, device), tokens(6, 2, 16, F32, device, 1, batch=1)
    cache = row.expand(2, 6, 2, 16)
    dense = cache.contiguous()
    lengths = torch.tensor([4, 6], device=device)
    output = kernel.flash_attn_with_kvcache(q, cache, cache, cache_seqlens=lengths)
    assert_bits_equal(output, kernel.flash_attn_with_kvcache(q, dense, dense.clone(), cache_seqlens=lengths))


@pytest.mark.parametrize("layout", ["heads_first", "one_memory_side_by_side", "every_second"])
def test_caches_of_any_strides_are_written(kernel, device, lengths_unknown, layout):
    q, *new = (tokens(1, 2, 16, F32, device, seed) for seed in range(3))
    if layout == "heads_first":
        caches = [torch.zeros(2, 2, 6, 16, device=device).transpose(1, 2) for _ in range(2)]
    elif layout == "one_memory_side_by_side":
        caches = torch.zeros(2, 6, 2, 2, 16, device=device).unbind(2)
    else:
        caches = [torch.zeros(2, 6, 4, 16, device=device)[:, :, ::2] for _ in range(2)]
    lengths = torch.tensor([4, 1], device=device)
    kernel.flash_attn_with_kvcache(q, *caches, *new, lengths)
    for cache, rows in zip(caches, new):
        expected = torch.zeros(2, 6, 2, 16, device=device)
        expected[0, 4], expected[1, 1] = rows[0, 0], rows[1, 0]
        assert_bits_equal(cache.contiguous(), expected)


INTERLEAVED = {
    "heads": lambda memory: (memory[:, :, 0::2, :8], memory[:, :, 1::2, :8]),
    "columns": lambda memory: (memory[:, :, :2, :8], memory[:, :, :2, 8:]),
    "columns_by_turns": lambda memory: (memory[:, :, :2, ::2], memory[:, :, :2, 1::2]),
    "values_first": lambda memory: (memory[:, :, :2, 8:], memory[:, :, :2, :8]),
    "rows": lambda memory: (memory[:, ::2, :2, :8], memory[:, 1::2, :2, :8]),
    "halves": lambda memory: (memory[:2, :, :2, :8], memory[2:, :, :2, :8]),
}


@pytest.mark.parametrize("case", INTERLEAVED)
def test_caches_side_by_side_in_one_memory_are_written(kernel, device, lengths_unknown, case):
    memory = torch.zeros(4, 12, 4, 16, device=device)
    caches = INTERLEAVED[case](memory)
    batch = caches[0].shape[0]
    q, *new = (tokens(1, 2, 8, F32, device, seed, batch=batch) for seed in range(3))
    lengths = torch.arange(batch, device=device) + 1
    expected = [torch.zeros_like(cache) for cache in caches]
    for cache, rows in zip(expected, new):
        cache[torch.arange(batch, device=device), lengths] = rows[:, 0]
    output = kernel.flash_attn_with_kvcache(q, *caches, *new, lengths)
    for cache, other in zip(caches, expected):
        assert_bits_equal(cache, other)
    assert memory.count_nonzero() == sum(cache.count_nonzero() for cache in expected)
    torch.testing.assert_close(output, kernel.flash_attn_with_kvcache(q, *expected, cache_seqlens=lengths + 1))


@pytest.mark.parametrize("width", [16, 10], ids=["the_same", "the_beginning_of_each_row"])
@pytest.mark.parametrize("layout", ["dense", "paged"])
def test_keys_that_are_the_values_too(kernel, device, lengths_unknown, layout, width):
    """As in MLA: one cache, in which both write the same."""
    q, k = (tokens(2, 2, 16, F32, device, seed) for seed in (0, 1))
    cache = tokens(6, 2, 16, F32, device, 2, batch=4)
    table = None if layout == "dense" else torch.tensor([[3, 1], [0, 2]], device=device)
    cache = cache[:2] if table is None else cache
    others = cache.clone(), cache[..., :width].clone()
    lengths = torch.tensor([2, 3], device=device)
    output = kernel.flash_attn_with_kvcache(q, cache, cache[..., :width], k, k[..., :width], lengths, table)
    assert_bits_equal(output, kernel.flash_attn_with_kvcache(q, *others, k, k[..., :width].clone(), lengths, table))
    assert_bits_equal(cache, others[0])


def elements(tensor, memory):
    places = torch.arange(memory.numel()).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
    return set(places.flatten().tolist())


def test_which_caches_share_an_element(kernel):
    """As counting the elements says, of views with equal strides."""
    memory = torch.zeros(3, 4, 5, 6)
    found = set()
    for starts_of_axes in itertools.product(range(2), range(3), range(3), range(4)):
        for steps in ((1, 1, 1, 1), (1, 2, 1, 2), (2, 1, 2, 3)):
            a = memory[:: steps[0], :: steps[1], :: steps[2], :: steps[3]][:, :2, :2, :2]
            b = memory[tuple(slice(start, None, step) for start, step in zip(starts_of_axes, steps))][:, :2, :2]
            shared = not elements(a, memory).isdisjoint(elements(b, memory))
            assert kernel._cache._share_an_element(a, b) == shared
            assert kernel._cache._share_an_element(b, a) == shared
            found.add(shared)
    assert found == {True, False}


NO_PLACE = {
    "too_long": ([4, 1], [[0, 1], [2, 3]]),
    "no_page": ([2, 1], [[0, -1], [2, 3]]),
    "beyond_the_pages": ([2, 1], [[0, 7], [2, 3]]),
    "two_sequences_in_one_place": ([2, 2], [[0, 1], [0, 1]]),
}


@pytest.mark.parametrize("case", NO_PLACE)
def test_new_keys_without_a_place(kernel, device, case):
    """Refused before anything is written, where lengths are known."""
    if device != "cpu":
        pytest.skip("of the CPU alone: elsewhere nobody looks at what index tensors hold")
    lengths, table = NO_PLACE[case]
    caches = [normal((4, 2, 2, 16), F32, device=device, seed=seed) for seed in (1, 2)]
    before = [cache.clone() for cache in caches]
    q, k, v = (tokens(1, 2, 16, F32, device, seed) for seed in range(3))
    with pytest.raises(kernel.AttentionSetupError, match=r"flash_attn_with_kvcache: (cache_seqlens|block_table) "):
        kernel.flash_attn_with_kvcache(q, *caches, k, v, torch.tensor(lengths), torch.tensor(table))
    for cache, old in zip(caches, before):
        assert_bits_equal(cache, old)


@pytest.mark.parametrize("valid", list(itertools.product([False, True], repeat=3)))
def test_writing_without_waiting(kernel, device, valid):
    """As on a GPU, where rows without a place are left out and no other place changes."""
    cache = normal((3, 2, 1, 4), F32, device=device)
    new = normal((3, 1, 4), F32, device=device, seed=1)
    slots = torch.tensor([4, 1, 2], device=device)
    flags = torch.tensor(valid, device=device)
    expected = cache.clone()
    for slot, row, flag in zip(slots.tolist(), new, valid):
        if flag:
            expected[slot // 2, slot % 2] = row
    kernel._cache._write_without_waiting(cache, new, slots.where(flags, 0), flags)
    assert_bits_equal(cache, expected)


def test_a_gradient_of_the_cache_is_refused(kernel, device):
    q, k, v = (tokens(count, 2, 8, F32, device, seed) for count, seed in ((1, 0), (6, 1), (6, 2)))
    q.requires_grad_()
    with pytest.raises(kernel.AttentionSetupError, match="q must not require a gradient"):
        kernel.flash_attn_with_kvcache(q, k, v)
    with torch.no_grad():
        assert not kernel.flash_attn_with_kvcache(q, k, v).requires_grad


def test_deterministic_changes_nothing(kernel, device):
    q, k, v = (tokens(5, 2, 8, F32, device, seed) for seed in range(3))
    assert_bits_equal(kernel.flash_attn_func(q, k, v, deterministic=True), kernel.flash_attn_func(q, k, v))
