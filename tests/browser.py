"""Headless Chromium without a network, for pages that must work there."""

import re
import shutil
import subprocess

from missing import skip_or_fail

REMEDY = "Chromium is not installed: apt-get install chromium (make test-all installs it)"
CONSOLE = re.compile(r"CONSOLE[^\n]*")


def chromium() -> list[str]:
    """The command, in a network namespace of its own where this user may make one."""
    found = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if found is None:
        skip_or_fail(REMEDY)
    return [*_without_network(), found, "--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run"]


def _without_network() -> list[str]:
    for options in (["-n"], ["-r", "-n"]):
        if subprocess.run(["unshare", *options, "true"], capture_output=True).returncode == 0:
            return ["unshare", *options]
    return []


def opened(page, folder) -> tuple[str, list[str]]:
    """(the document once its scripts have run, what they wrote to the console)."""
    command = [*chromium(), f"--user-data-dir={folder}", "--enable-logging=stderr", "--v=0", "--dump-dom",
               page.absolute().as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout, CONSOLE.findall(done.stderr)


def pictured(page, picture, folder, width: int) -> bytes:
    """A screenshot of the page at that width."""
    command = [*chromium(), f"--user-data-dir={folder}", "--hide-scrollbars", f"--window-size={width},2000",
               f"--screenshot={picture}", page.absolute().as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return picture.read_bytes()
