"""A headless browser that opens a page as anybody's would."""

import shutil
import subprocess

from tests.support.forked import printed

BROWSER = next((found for name in ("chromium", "google-chrome", "chrome") if (found := shutil.which(name))), None)
MISSING = "no Chromium here"


def opened(url, folder):
    """The document after its scripts have run, and what the console called an error."""
    options = ("--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--dump-dom")
    command = [BROWSER, *options, f"--user-data-dir={folder}", "--virtual-time-budget=5000", url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    return printed(done), [line for line in done.stderr.splitlines() if "CONSOLE" in line and "rror" in line]
