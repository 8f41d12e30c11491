"""A run's report as one web page that needs nothing else: no network, no other files. Several runs share it.

Served on loopback, for those who know the token, it follows the runs.
"""

from __future__ import annotations

import base64
import hashlib
import json
import secrets
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from html import escape
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock
from urllib.parse import parse_qs, unquote, urlsplit

from megagrpo.errors import MegagrpoError, Problem, ReportError
from megagrpo.plan.show import page as plan_page
from megagrpo.report.parts import Part, curve_parts, digest, embed, encode, settings_parts, timing_parts
from megagrpo.report.run import RESPONSES, RunRead, read_run
from megagrpo.report.samples import sample_parts
from megagrpo.track.rollout_files import ROLLOUTS

FOLDER = Path(__file__).parent
STYLES = ("vendor/uPlot.min.css", "page.css")
SCRIPTS = ("page.js", "vendor/uPlot.iife.min.js", "charts.js")
"""Scripts of every page, in this order, before the scripts of its parts."""
GENERATOR = '<meta name="generator" content="megagrpo report">'
"""The mark of a page that a later report may replace."""


def parts(runs: Sequence[RunRead], samples: int | None = None) -> list[Part]:
    """Returns the sections of the page of these runs. The others are compared with the first run. samples: as for
    `sample_parts`."""
    return [*curve_parts(runs), *sample_parts(runs, samples), *timing_parts(runs), *settings_parts(runs)]


def page(runs: Sequence[RunRead], *, samples: int | None = None) -> str:
    """Returns the whole page, in HTML. samples: as for `parts`."""
    return page_of(parts(runs, samples), runs)


def page_of(shown: Sequence[Part], runs: Sequence[RunRead], *, live: bool = False) -> str:
    """Returns the page of these parts. live: it asks its own server for changed parts and for late columns."""
    styles = dict.fromkeys((*STYLES, *(style for part in shown for style in part.styles)))
    scripts = [_text(name) for name in dict.fromkeys((*SCRIPTS, *(name for part in shown for name in part.scripts)))]
    title = escape(" · ".join(run.name for run in runs))
    links = "".join(f'<a href="#{part.anchor}">{escape(part.title)}</a>' for part in shown)
    sections = "".join(
        f'<section id="{part.anchor}" aria-labelledby="{part.anchor}-title"><h2 id="{part.anchor}-title">'
        f"{escape(part.title)}</h2>\n<div class=body>{part.html}</div></section>\n"
        for part in shown
    )
    return f"""<!doctype html>
<html lang="en" data-palette="{" ".join(plan_page.PALETTE)}"{" data-live" if live else ""}>
<head><meta charset="utf-8">{GENERATOR}<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{_policy(scripts)}">
<title>{title}: report</title>
<style>{"".join(map(_text, styles))}</style></head>
<body>
<header><h1>{title}</h1><nav aria-label="sections">{links}</nav>
<button id="theme" type="button" class="control">light or dark</button></header>
<main>
{sections}</main>
{"".join(embed(name, encode(columns)) for part in shown for name, columns in part.data.items())}
{"".join(f"<script>{text}</script>" for text in scripts)}
{"".join(embed(name, encoded) for part in shown if not live for name, encoded in part.late.items())}
</body></html>
"""


def write_page(path: Path, text: str) -> None:
    """Writes the page to `path`, whole or not at all. Raises ReportError, for example if another file is there."""
    plan_page.write_page(path, text, GENERATOR, ReportError)


def _policy(scripts: Iterable[str]) -> str:
    """Returns the policy: only the page's own scripts run, whatever samples say, and the page asks only its server."""
    digests = (base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in scripts)
    allowed = " ".join(f"'sha256-{digest}'" for digest in digests)
    return f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; connect-src 'self'; img-src data:"


def _text(name: str) -> str:
    return (FOLDER / name).read_text(encoding="utf-8")


# --- the page and its changes on loopback -----------------------------------------------------------------------------

READ = ("*.json*", "*.yaml", *RESPONSES)
LOOPBACK = "127.0.0.1"
TEXT = "text/plain; charset=utf-8"
HEADERS = {
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Cross-Origin-Resource-Policy": "same-origin",
}


class LiveReport:
    """The newest report of some runs. It is made anew when one of their files has changed."""

    def __init__(self, directories: Sequence[Path]) -> None:
        self._directories, self._lock = directories, Lock()
        self._marks: list[object] | None = None
        self._runs, self._parts = list[RunRead](), list[Part]()
        self._columns, self._late = dict[str, bytes](), dict[str, bytes]()
        self._late_before: dict[str, bytes] = {}  # for pages that have not asked since

    def page(self) -> bytes:
        """Returns the page. Raises ReportError."""
        with self._lock:
            self._refresh()
            return page_of(self._parts, self._runs, live=True).encode(errors="replace")

    def changes(self) -> bytes:
        """Returns digests of all columns, and the HTML of parts without a script, for page.js. Raises ReportError."""
        with self._lock:
            self._refresh()
            columns = {name: digest(encoded) for name, encoded in self._columns.items()}
            html = {part.anchor: part.html for part in self._parts if not part.scripts}
            return json.dumps({"data": columns, "html": html}).encode(errors="replace")

    def columns(self, name: str) -> bytes | None:
        """Returns columns encoded by parts.encode; None if there are none of this name."""
        with self._lock:
            self._refresh()
            return self._columns.get(name) or self._late.get(name) or self._late_before.get(name)

    def _refresh(self) -> None:
        marks = [mark for directory in self._directories for mark in _marks(directory)]
        if marks == self._marks:
            return
        runs = [read_run(directory) for directory in self._directories]
        made = parts(runs)
        self._runs, self._parts, self._late_before = runs, made, self._late
        self._columns = {name: encode(columns) for part in made for name, columns in part.data.items()}
        self._late = {name: encoded for part in made for name, encoded in part.late.items()}
        self._marks = marks


def _marks(directory: Path) -> list[object]:
    """Returns marks that change with the report: name, time and size of files, and of the folders with files by step,
    which are replaced and never written twice."""
    paths = [path for pattern in READ for path in directory.glob(pattern)]
    marks = list[object]()
    for path in (directory / ROLLOUTS, directory / "evaluations", *sorted(paths)):
        with suppress(FileNotFoundError):  # the run writes none yet, or replaces it at this moment
            status = path.stat()
            marks.append((str(path), status.st_mtime_ns, status.st_size))
    return marks


def serve(directories: Sequence[Path], port: int, say: Callable[[str], None]) -> None:
    """Serves the report of these runs until Ctrl-C. port 0: a free one. Raises ReportError, also if there is no run."""
    live = LiveReport(directories)
    live.changes()
    with ReportServer(live, port) as server:
        say(f"http://{LOOPBACK}:{server.server_port}/?token={server.token}")
        say("It follows the run. From another machine, forward the port by ssh. Ctrl-C ends it.")
        server.serve_forever()


class ReportServer(ThreadingHTTPServer):
    """A server that answers only requests that carry the token and name its own address."""

    daemon_threads = True

    def __init__(self, live: LiveReport, port: int) -> None:
        """Starts to listen. Raises ReportError if the port is taken."""
        self.live, self.token = live, secrets.token_urlsafe(32)
        try:
            super().__init__((LOOPBACK, port), _Handler)
        except OSError as error:
            given, fix = (error.strerror or str(error)).lower(), "another --port, or none: then it takes a free one"
            raise ReportError(Problem(f"--port {port}", given, "a port of loopback that is free", fix)) from error


class _Handler(BaseHTTPRequestHandler):
    server: ReportServer
    timeout = 30  # seconds for a request to come

    def do_GET(self) -> None:
        status, body, kind = self._answer()
        try:
            self.send_response(status)
            for name, value in {**HEADERS, "Content-Type": kind, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True  # its reader has gone

    def _answer(self) -> tuple[HTTPStatus, bytes, str]:
        try:
            address, host = urlsplit(self.path), urlsplit(f"//{self.headers.get('Host', '')}").hostname
        except ValueError:
            return HTTPStatus.BAD_REQUEST, b"no address\n", TEXT
        # A page from elsewhere whose name leads to loopback sends its own name as the host. The port may be another:
        # that from which ssh forwards.
        if host not in (LOOPBACK, "localhost"):
            return HTTPStatus.MISDIRECTED_REQUEST, b"not this server's address\n", TEXT
        token = parse_qs(address.query).get("token", [""])[0]
        if not secrets.compare_digest(token.encode(errors="replace"), self.server.token.encode()):
            return HTTPStatus.FORBIDDEN, b"the address that megagrpo report printed has a token\n", TEXT
        live = self.server.live
        try:
            if address.path == "/":
                return HTTPStatus.OK, live.page(), "text/html; charset=utf-8"
            if address.path == "/changes":
                return HTTPStatus.OK, live.changes(), "application/json"
            of_data = address.path.startswith("/data/")
            columns = live.columns(unquote(address.path.removeprefix("/data/"))) if of_data else None
        except (MegagrpoError, OSError) as error:
            return HTTPStatus.SERVICE_UNAVAILABLE, f"{error}\n".encode(errors="replace"), TEXT
        if columns is None:
            return HTTPStatus.NOT_FOUND, b"there is no such thing\n", TEXT
        return HTTPStatus.OK, columns, "application/octet-stream"

    def log_message(self, format: str, *args: object) -> None:
        """Prints nothing: a terminal that follows a run has other things to show."""
