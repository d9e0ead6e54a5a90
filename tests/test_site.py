"""The site is built strictly and describes each public name; its links out of docs/ lead to the source."""

import functools
import http.server
import os
import re
import sys
import threading

import pytest

import nvme_offload
from tests.support.browser import BROWSER, MISSING, opened
from tests.support.forked import ROOT, output_of

SOURCE = re.compile(r'href="https://github\.com/nvme-offload/nvme-offload/(?P<kind>blob|tree)/main/(?P<path>[^"#]+)')


@pytest.fixture(scope="module")
def site(once):
    def built(target):
        command = (sys.executable, "-m", "mkdocs", "build", "--strict", "-f", ROOT / "mkdocs.yml", "-d", target)
        output_of(*command, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"})
        return target

    return once("site", built)


INHERITED = ("OffloadEngine.save_checkpoint", "OffloadEngine.resume", "OffloadOptimizer.rewind")


def test_every_public_name_has_its_place(site):
    pages = "".join(page.read_text(encoding="utf-8") for page in (site / "reference").rglob("index.html"))
    described = set(re.findall(r'<h2 id="nvme_offload\.(\w+)"', pages))
    assert described == {*nvme_offload.__all__, *nvme_offload.adapters.__all__}
    for member in ("OffloadAdamW", "OffloadOptimizer.step", "TensorSwapper.swap_in", *INHERITED):
        assert f'id="nvme_offload.{member}"' in pages, member


def test_links_to_the_source_lead_there_and_no_block_of_code_is_shown_as_text(site):
    found = set()
    for page in site.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        assert "```" not in text, page
        left = re.findall(r'href="(?:\.\./)+(?:aio_native|offload|optim|perf|tests|scripts)/[^"]*"', text)
        assert not left, page
        found |= {(match["kind"], match["path"]) for match in SOURCE.finditer(text)}
    assert len(found) > 100
    for kind, path in found:
        assert (ROOT / path).is_dir() if kind == "tree" else (ROOT / path).is_file(), path


@pytest.fixture
def address(site):
    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=site)) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


@pytest.mark.skipif(BROWSER is None, reason=MISSING)
@pytest.mark.parametrize("page", ["reference/optimizers/", pytest.param("configuration/", marks=pytest.mark.slow)])
def test_a_browser_shows_it_without_script_errors(address, page, tmp_path):
    document, errors = opened(f"{address}/{page}", tmp_path)
    assert "<title>" in document
    assert "data-md-color-scheme" in document
    assert not errors
