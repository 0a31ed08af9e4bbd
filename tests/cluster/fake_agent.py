"""Stands in for `foremoe.agent` in real pods, so that a test decides how the training ends.

Put as package `foremoe.agent` on a volume that PYTHONPATH names. It serves the same paths, writes the same termination
message, and obeys an order: `run`, `exit N`, `problem REASON MESSAGE` or `oom`. The first one comes by the environment
variable HEAD_ORDER or WORKER_ORDER, later ones by POST.
"""

import json
import os
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

ROLE = os.environ["FOREMOE_ROLE"]
BOOT = json.loads(Path(os.environ["FOREMOE_BOOT_FILE"]).read_text())
ORDERS = [os.environ.get(f"{ROLE.upper()}_ORDER", "run")]
REPORT = {
    "stage": "Booting",
    "workersJoined": 0,
    "step": 0,
    "totalSteps": BOOT["spec"]["totalSteps"],
    "reward": 0.25,
    "stepSeconds": 1.5,
    "balance": {"mean": 1.25, "max": 2.0},
}


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        body = json.dumps(REPORT).encode() if self.path == "/v1/progress" else b"ok"
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self):
        ORDERS.append(self.rfile.read(int(self.headers["Content-Length"])).decode())
        self.send_response(204)
        self.end_headers()

    def log_message(self, *arguments):
        pass


def finish(code, **report):
    REPORT.update(report)
    Path(os.environ["FOREMOE_TERMINATION_FILE"]).write_text(json.dumps(REPORT))
    sys.exit(code)


def main():
    server = ThreadingHTTPServer(("", 8470), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print("fake agent:", ROLE, flush=True)
    time.sleep(1)
    checkpoint = {"step": 1, "path": "/data/checkpoints/global_step_1", "time": "2026-07-01T12:00:00Z"}
    joined = BOOT["spec"]["workers"]["replicas"]
    REPORT.update(stage="Rollout", workersJoined=joined, step=1, checkpoint=checkpoint)
    while True:
        word, *rest = ORDERS[-1].split(maxsplit=2)
        if word == "exit":
            code = int(rest[0])
            log = "" if code == 0 else "Traceback\nRuntimeError: made to fail"
            finish(code, stage="Finished", step=REPORT["totalSteps"], exitCode=code, logTail=log)
        if word == "problem":
            finish(78, problem={"reason": rest[0], "message": rest[1]})
        if word == "oom":
            hog = []
            while True:
                hog.append(bytearray(8 << 20))
        time.sleep(0.2)


main()
