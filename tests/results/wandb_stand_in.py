"""A W&B server for tests: HTTP on loopback, enough GraphQL for `wandb.init`, `log` and `finish`, the file stream, and to read one
run back through W&B's public API.

It proves what our calls send, not that W&B accepts it.
"""

import gzip
import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

API_KEY = "0123456789abcdef" * 2 + "01234567"  # any 40 characters


class StandIn(ThreadingHTTPServer):
    """Remembers what was sent: `operations` (GraphQL names with variables), `history` (rows), `summary` (the last line sent)."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.operations = []
        self.history = []
        self.summary = {}
        self.completed = []  # exit codes of the runs that said good-bye
        self.silent = threading.Event()  # set: accept, read, never answer
        self.knows_key = True
        self.closing = threading.Event()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_address[1]}"

    def kill(self):
        """From now on connections are refused."""
        self.closing.set()
        self.shutdown()
        self.server_close()

    def variables(self, operation):
        """Variables of the first call of a GraphQL operation."""
        return next(variables for name, variables in self.operations if name == operation)


class _Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        if self.server.silent.is_set() or self.server.closing.is_set():
            self.server.closing.wait()
            self.close_connection = True
            return
        if self.path == "/graphql":
            self._answer({"data": self._graphql(json.loads(body))})
        elif self.path.endswith("/file_stream"):
            self._file_stream(json.loads(body))
            self._answer({"exitcode": None, "limits": {}})
        else:
            self._answer({})

    def do_PUT(self):
        self.do_POST()

    def do_GET(self):
        self._answer({})

    def log_message(self, format, *args):
        """Quiet."""

    def _answer(self, content):
        body = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _graphql(self, request):
        name = request.get("operationName") or request["query"].split("(")[0].split("{")[0].split()[-1]
        variables = request.get("variables") or {}
        self.server.operations.append((name, variables))
        if name == "Viewer" and not self.server.knows_key:
            return {"viewer": None}
        return _read_back(self.server, name) or _graphql_data(name, variables)

    def _file_stream(self, request):
        for name, chunk in (request.get("files") or {}).items():
            rows = [json.loads(line) for line in chunk["content"]]
            if name == "wandb-history.jsonl":
                self.server.history += rows
            elif name == "wandb-summary.json" and rows:
                self.server.summary = rows[-1]
        if request.get("complete"):
            self.server.completed.append(request["exitcode"])


def _read_back(server, operation):
    """The run that was sent, as the public API asks for it; empty for other operations."""
    keys = {"lastStep": len(server.history) - 1, "keys": {}}
    match operation:
        case "Runs":
            sent = server.variables("UpsertBucket")
            node = {"id": "bucket", "tags": sent["tags"], "name": sent["name"], "displayName": sent["displayName"],
                    "sweepName": None, "state": "finished", "config": sent["config"], "group": sent["groupName"], "jobType": None,
                    "commit": None, "readOnly": False, "createdAt": "2026-01-01T00:00:00", "heartbeatAt": None,
                    "description": None, "notes": None, "systemMetrics": "{}", "summaryMetrics": json.dumps(server.summary),
                    "historyLineCount": len(server.history), "user": {"name": "tester", "username": "tester"},
                    "historyKeys": keys, "projectId": "1"}  # fmt: skip
            page = {"edges": [{"node": node, "cursor": "1"}], "pageInfo": {"endCursor": "1", "hasNextPage": False}}
            return {"project": {"internalId": "1", "runCount": 1, "readOnly": False, "runs": page}}
        case "RunHistoryKeys":
            return {"project": {"run": {"historyKeys": keys}}}
        case "RunParquetHistory":
            steps = [{"_step": row["_step"]} for row in server.history]
            return {"project": {"run": {"parquetHistory": {"parquetUrls": [], "liveData": steps}}}}
        case "HistoryPage":
            return {"project": {"run": {"history": [json.dumps(row) for row in server.history]}}}
        case _:
            return {}


def _graphql_data(operation, variables):
    entity = {"id": "entity", "name": "tester"}
    project = {"id": "project", "name": variables.get("project", "project"), "entity": entity}
    match operation:
        case "Viewer" | "GetDefaultEntity":
            return {"viewer": {"id": "user", "username": "tester", "entity": "tester", "email": "", "flags": "{}", "admin": False,
                               "apiKeys": {"edges": []}, "teams": {"edges": []}}}  # fmt: skip
        case "UpsertBucket":
            name = variables.get("name") or "run"
            bucket = {"id": "bucket", "name": name, "displayName": variables.get("displayName"), "description": None,
                      "config": "{}", "sweepName": None, "project": project, "historyLineCount": 0}  # fmt: skip
            return {"upsertBucket": {"bucket": bucket, "inserted": True}}
        case "CreateArtifact":  # of a table: one that the server has already need not be uploaded
            sequence = {"id": "sequence", "name": "verdicts", "latestArtifact": None}
            return {"createArtifact": {"artifact": {"id": "artifact", "state": "COMMITTED", "artifactSequence": sequence}}}
        case "CreateRunFiles":
            return {"createRunFiles": {"runID": "bucket", "uploadHeaders": [], "files": []}}
        case "RunResumeStatus":
            return {"model": None}
        case _:
            return {}


@contextmanager
def stand_in():
    """A server that runs until the block ends, or until `kill`."""
    server = StandIn()
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        if not server.closing.is_set():
            server.kill()
        thread.join()
