"""benchmarks/low_precision.py: an interrupted comparison continues, and too large differences are reported."""

import json

import low_precision
import pytest


def test_an_interrupted_comparison_goes_on_where_it_was(tmp_path, monkeypatch):
    done, tasks, results = [], {}, tmp_path / "results.json"
    for task in ("digits", "surrogate"):
        tasks[task] = tmp_path / f"{task}.h5"
        tasks[task].write_bytes(b"data")

    def figure(self, data, folder):
        if len(done) == 5:
            done.append(None)
            raise KeyboardInterrupt
        done.append(self)
        return {"float32": 20.0, "bfloat16": 20.4, "float16": 30.0}[self.precision]

    monkeypatch.setattr(low_precision.Training, "figure", figure)
    with pytest.raises(KeyboardInterrupt):
        low_precision.figures(tasks, results)
    assert len(json.loads(results.read_text())) == 5
    found = low_precision.figures(tasks, results)
    done.remove(None)
    assert len(found) == len(done) == len(set(done)) == 24 and {each.precision for each in done[:16]} == {
        "float32",
        "bfloat16",
    }
    assert low_precision.figures(tasks, results) == found and len(done) == 24
    assert low_precision.too_far(found) == []
    table = low_precision.table(tasks, found)
    assert ["digits, ddp", "20.00", "20.40 (+0.40 points)", "30.00 (+10.00 points)"] in table
    assert ["surrogate, hsdp, data 2", "20.00", "20.40 (+2.00 %)", "30.00 (+50.00 %)"] in table
    found[low_precision.Training("surrogate", "fsdp", 1, "bfloat16")] = 22.1
    assert [each.shape for each in low_precision.too_far(found)] == ["fsdp"]
    tasks["surrogate"].write_bytes(b"other data")
    low_precision.figures(tasks, results)
    assert len(done) == 36
