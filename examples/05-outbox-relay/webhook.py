"""A receiver for trying it out: takes each idempotency key once, and refuses order 13."""

import json
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

taken: set[str] = set()


class Webhook(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        key = self.headers["Idempotency-Key"]
        order = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["order"]
        time.sleep(0.02)
        refused = order == 13
        if not refused:
            print(f"{'again' if key in taken else 'took'} {key}\n", end="", flush=True)
            taken.add(key)
        text = b"unknown order" if refused else b"thanks"
        self.send_response(422 if refused else 200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, format: str, *args: object) -> None:
        pass


server = ThreadingHTTPServer(("127.0.0.1", 0), Webhook)
server.daemon_threads = True
print(f"http://127.0.0.1:{server.server_address[1]}", flush=True)
server.serve_forever()
