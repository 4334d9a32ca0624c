"""Key traces are read in both formats, and mistakes are named by file, line and field."""

from __future__ import annotations

import gzip

import pytest

from cache_policy.traces import TraceError, infer_block_size, read_trace

GOOD = [
    '{"timestamp": 0, "input_length": 1100, "output_length": 5, "hash_ids": [7, 9, 11]}',
    '{"timestamp": 1, "input_length": 1400, "output_length": 5, "hash_ids": [7, 9, 12]}',
    '{"timestamp": 2, "input_length": 3, "output_length": 5, "hash_ids": [13]}',
    '{"timestamp": 3, "input_length": 512, "output_length": 5, "hash_ids": [14]}',
]


def write(tmp_path, lines, name="trace.jsonl"):
    path = tmp_path / name
    path.write_text("\n".join(lines) + "\n")
    return path


def test_blocks_are_numbered_by_first_use_and_know_their_parents(tmp_path):
    trace = read_trace(write(tmp_path, GOOD))
    assert trace.requests == ((0, 1, 2), (0, 1, 3), (4,), (5,))
    assert trace.parents == (-1, 0, 1, 1, -1, -1)
    assert trace.lengths == (1100, 1400, 3, 512)
    assert (trace.unique_blocks, trace.accesses, trace.tokens) == (6, 8, 3015)
    assert trace.block_size == 512
    assert trace.conflict is None


def test_gzip_is_recognized_by_its_content(tmp_path):
    plain = read_trace(write(tmp_path, GOOD))
    packed = tmp_path / "packed"
    packed.write_bytes(gzip.compress("\n".join(GOOD).encode()))
    assert read_trace(packed).requests == plain.requests


def test_keys_may_be_strings(tmp_path):
    lines = ['{"input_length": 32, "hash_ids": ["a0", "b1"]}', '{"input_length": 40, "hash_ids": ["a0", "c2"]}']
    assert read_trace(write(tmp_path, lines), 16).requests == ((0, 1), (0, 2))


@pytest.mark.parametrize("header", [[], ["obj_id"]])
def test_one_id_a_line_is_a_request_for_one_block_of_one_token(tmp_path, header):
    trace = read_trace(write(tmp_path, [*header, "5", "6", "", "5"], "ids.csv"))
    assert trace.requests == ((0,), (1,), (0,))
    assert trace.lengths == (1, 1, 1)
    assert trace.block_size == 1


def test_ids_that_are_no_prefixes_are_read_and_named(tmp_path):
    lines = ['{"input_length": 2, "hash_ids": [1, 2]}', '{"input_length": 1, "hash_ids": [2]}']
    conflict = read_trace(write(tmp_path, lines)).conflict
    assert conflict is not None
    assert "trace.jsonl: line 2, field hash_ids[0]: id 2" in conflict
    assert "line 1" in conflict


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "trace.jsonl: line 2:"),
        ("[]", "trace.jsonl: line 2: Expected `object`"),
        ("{}", "trace.jsonl: line 2: .*`input_length`.*headstart analyze"),
        ('{"input_length": 1}', "trace.jsonl: line 2: .*`hash_ids`"),
        ('{"input_length": "1", "hash_ids": []}', "line 2, field input_length: Expected `int`, got `str`"),
        ('{"input_length": -1, "hash_ids": []}', "line 2, field input_length: .*-1"),
        ('{"input_length": 1, "hash_ids": 5}', "line 2, field hash_ids: Expected `array`, got `int`"),
        ('{"input_length": 1, "hash_ids": [1, 2, null]}', r"line 2, field hash_ids\[2\]: .*got `null`"),
        ('{"input_length": 1, "hash_ids": [1.5]}', r"line 2, field hash_ids\[0\]: .*got `float`"),
        ('{"input_length": 2, "hash_ids": [3, 3]}', "line 2, field hash_ids: an id stands twice"),
        ('{"input_length": 600, "hash_ids": [1, 2, 3]}', "line 2, field hash_ids: 3 blocks of 512 tokens .* 600"),
    ],
)
def test_a_malformed_line_is_named_with_its_field(tmp_path, line, message):
    with pytest.raises(TraceError, match=message):
        read_trace(write(tmp_path, [GOOD[0], line]), 512)


@pytest.mark.parametrize(
    ("lines", "message"),
    [([], "no requests"), ([""], "no requests"), (["5", "1,2"], "line 2, field id"), (["id"], "no requests")],
)
def test_a_file_without_a_trace_is_refused(tmp_path, lines, message):
    with pytest.raises(TraceError, match=message):
        read_trace(write(tmp_path, lines))


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(TraceError, match=r"absent\.jsonl: cannot be read"):
        read_trace(tmp_path / "absent.jsonl")
    cut = tmp_path / "cut.jsonl.gz"
    cut.write_bytes(gzip.compress("\n".join(GOOD).encode())[:-9])
    with pytest.raises(TraceError, match=r"cut\.jsonl\.gz: cannot be read"):
        read_trace(cut)


@pytest.mark.parametrize("size", [1, 16, 64, 512])
@pytest.mark.parametrize("up", [False, True])
def test_the_block_size_is_the_one_that_explains_every_count(size, up):
    lengths = [size * 7 + 1, size * 8 - 1, size * 100 + size // 2, size]
    counts = [-(-length // size) if up else length // size for length in lengths]
    assert infer_block_size(counts, lengths) == (size,)


@pytest.mark.parametrize("lengths_and_counts", [([5, 6], [1, 1]), ([100, 100], [3, 7])])
def test_a_block_size_that_cannot_be_told_is_asked_for(tmp_path, lengths_and_counts):
    serial = iter(range(100))
    lines = [
        f'{{"input_length": {length}, "hash_ids": {[next(serial) for _ in range(count)]}}}'
        for length, count in zip(*lengths_and_counts, strict=True)
    ]
    with pytest.raises(TraceError, match="--trace-block-size"):
        read_trace(write(tmp_path, lines))
