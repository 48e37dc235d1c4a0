"""The program on the page about torch, and the one to copy, run."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_program_of_the_page_trains(job):
    page = (ROOT / "docs" / "torch.md").read_text()
    [text] = [text for text in re.findall(r"^```python\n(.*?)^```$", page, re.M | re.S) if "import" in text]
    said = "    print('loss', loss.item() < 3, list(weights) == ['0.weight', '0.bias', '3.weight', '3.bias'])\n"
    done = job(4, text + said, env={"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0 and done.stdout.count("loss True True") == 1, done.stdout + done.stderr
    assert done.stdout.count("loss True False") == 3


def test_the_program_to_copy_learns_the_digits(job):
    done = job(2, "import runpy, sys; sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')",
               ROOT / "apps" / "torch_bridge.py", "--grid", "2x1x1", timeout=300)
    assert done.returncode == 0, done.stderr
    [right] = re.findall(r"^loss [\d.]+, right ([\d.]+); 0.weight, 0.bias, 2.weight", done.stdout, re.M)
    assert float(right) > 0.9
