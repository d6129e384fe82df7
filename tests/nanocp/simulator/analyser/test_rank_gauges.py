"""Gauges of ranks: one scrape, several, a range query; what is none is refused."""

import json
from random import Random

import pytest

from nanocp.simulator.analyser.rank_gauges import read_gauges

ROWS = (27, 5, 0, 0)


def scrape(rows, waiting=(0, 0, 0, 0), kv=(0.9, 0.2, 0.0, 0.0), form="vllm", at=""):
    names = {"vllm": ("vllm:num_requests_running", "vllm:num_requests_waiting",
                      "vllm:kv_cache_usage_perc"),
             "sglang": ("sglang:num_running_reqs", "sglang:num_queue_reqs",
                        "sglang:token_usage")}[form]  # fmt: skip
    label = {"vllm": "engine", "sglang": "dp_rank"}[form]
    lines = []
    for name, values in zip(names, (rows, waiting, kv), strict=True):
        lines += [f"# HELP {name} x", f"# TYPE {name} gauge"]
        lines += [
            f'{name}{{{label}="{rank}",model_name="m"}} {value}{at}'
            for rank, value in enumerate(values)
        ]
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("form", ["vllm", "sglang"])
def test_one_scrape(tmp_path, form):
    (tmp_path / "metrics").write_text("other_total 5\n" + scrape(ROWS, form=form))
    found = read_gauges(tmp_path / "metrics")
    assert (found.num_ranks, found.num_moments, found.rows_mean) == (4, 1, 8)
    assert round(100 * found.row_imbalance) in range(237, 240), "the case of vllm#48808"
    assert found.kv_used == pytest.approx(0.275)
    assert found.kv_free_while_waiting == found.one_waits_another_has_room == 0


def test_names_of_vllm_in_a_page_of_ours_are_no_rank(tmp_path):
    ours = scrape(ROWS).replace("vllm:num_requests_running", "nanocp:rows")
    ours = ours.replace("vllm:kv", "nanocp:kv").replace("vllm:num_requests_waiting", "other")
    (tmp_path / "ours").write_text(ours)
    whole = "".join(f'vllm:{name}{{engine="0"}} 32\n' for name in ("num_requests_running", "x"))
    (tmp_path / "both").write_text(ours + whole)
    assert read_gauges(tmp_path / "both") == read_gauges(tmp_path / "ours")


@pytest.mark.parametrize("at", ["", " 1764000000000"])
def test_scrapes_one_behind_the_other(tmp_path, at):
    first = scrape(ROWS, waiting=(3, 0, 0, 0), at=at)
    second = scrape((8, 8, 8, 8), at=at.replace("000000000", "000005000"))
    (tmp_path / "metrics").write_text(first + second)
    found = read_gauges(tmp_path / "metrics")
    assert found.num_moments == 2 and found.row_imbalance == pytest.approx(2.375 / 2)
    assert found.kv_free_while_waiting == pytest.approx(0.725)
    assert found.one_waits_another_has_room == 0.5


def test_what_was_not_measured_is_not_zero_and_a_moment_counts_as_much_as_it_holds(tmp_path):
    def rows(*values, model="m"):
        name = f'vllm:num_requests_running{{model_name="{model}",engine="'
        return "".join(f'{name}{rank}"}} {value}\n' for rank, value in enumerate(values))

    path = tmp_path / "metrics"
    path.write_text(rows(27, 27, 27, 27) + rows(1, 0, 0, 0) * 3 + rows(float("inf"), 1, 1, 1))
    found = read_gauges(path)
    assert found.row_imbalance == pytest.approx((27 + 3 + 1) / (27 + 0.75 + 1) - 1, abs=0.01)
    assert found.kv_used is found.kv_imbalance is found.one_waits_another_has_room is None
    path.write_text(rows(9, 1) + rows(1, 9, model="other"))
    assert read_gauges(path).num_ranks == 4, "ranks of two models are not the same"
    full = scrape(ROWS, waiting=(3, 0, 0, 0), kv=(0.95, 0.95, 0.95, 0.95))
    path.write_text(full)
    assert read_gauges(path).one_waits_another_has_room == 0, "nobody had room"


def query(rows, name="vllm:num_requests_running"):
    return {
        "status": "success",
        "data": {
            "resultType": "matrix",
            "result": [
                {"metric": {"__name__": name, "engine": str(rank)}, "values": [[5, str(value)]]}
                for rank, value in enumerate(rows)
            ],
        },
    }


def test_a_range_query(tmp_path):
    (tmp_path / "query").write_text(json.dumps(query(ROWS)))
    assert read_gauges(tmp_path / "query").row_imbalance == pytest.approx(2.375)


@pytest.mark.parametrize(("text", "named"), [
    ("", "has no gauge of two ranks"),
    (json.dumps(query(ROWS, "vllm:other")), "has no gauge of two ranks"),
    ('vllm:num_requests_running{engine="0"} 3', "has no gauge of two ranks"),
    ('{"status": "error"}', "neither what /metrics answers nor"),
    ("<html>", "neither what /metrics answers nor"),
])  # fmt: skip
def test_what_is_no_gauge_is_answered_in_a_sentence(tmp_path, text, named):
    (tmp_path / "file").write_text(text)
    with pytest.raises(ValueError, match=named):
        read_gauges(tmp_path / "file")
    with pytest.raises(ValueError, match="neither what"):
        read_gauges(tmp_path / "none")


def test_a_cut_or_a_changed_file_is_read_or_refused_and_nothing_else(tmp_path):
    random, path = Random(3), tmp_path / "file"
    for text in (scrape(ROWS).encode(), json.dumps(query(ROWS)).encode()):
        for _ in range(150):
            changed = bytearray(text[: random.randrange(len(text) + 1)])
            if changed and random.random() < 0.7:
                changed[random.randrange(len(changed))] = random.randrange(256)
            path.write_bytes(changed)
            try:
                assert read_gauges(path).num_ranks >= 2
            except ValueError as error:
                assert str(path) in str(error)
