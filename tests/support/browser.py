"""A headless browser that opens a page as anybody's would."""

import shutil
import subprocess

BROWSER = next((found for name in ("chromium", "google-chrome", "chrome") if (found := shutil.which(name))), None)
MISSING = "no Chromium here"


def opened(url, folder):
    """The document after its scripts have run, and what the console called an error."""
    done = subprocess.run(
        [
            BROWSER,
            *("--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--dump-dom"),
            *(f"--user-data-dir={folder}", "--virtual-time-budget=5000", url),
        ],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line and "rror" in line]
