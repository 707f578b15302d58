"""A double of an OpenAI-compatible server that answers as told, and misbehaves as told."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class ChatDouble:
    """Serves `/v1/chat/completions` in a thread.

    `plan` is consulted with the number of the request (from 0) and its body, and returns what happens: `None` for an answer
    as usual, or a dict with `status`, `headers`, `stall`, `cut`, `content` or fields of the choice.
    """

    def __init__(self, plan=lambda number, body: None, answer=lambda body: "ab" + body["messages"][-1]["content"]):
        self.plan, self.answer = plan, answer
        self.bodies, self.active, self.most_active = [], 0, 0
        self.lock, self.released = threading.Lock(), threading.Event()
        double = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                double.handle(self)

            def log_message(self, *args):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1"

    def __enter__(self):
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *_):
        self.released.set()
        self.server.shutdown()
        self.server.server_close()

    def handle(self, handler):
        body = json.loads(handler.rfile.read(int(handler.headers["Content-Length"])))
        body["path"], body["authorization"] = handler.path, handler.headers["Authorization"]
        with self.lock:
            number = len(self.bodies)
            self.bodies.append(body)
            self.active += 1
            self.most_active = max(self.most_active, self.active)
        try:
            fate = self.plan(number, body) or {}
        finally:
            with self.lock:
                self.active -= 1  # before the answer goes out, since the client may ask again as soon as it is there
        self.respond(handler, body, fate)

    def respond(self, handler, body, fate):
        if fate.get("stall"):
            self.released.wait(60)
            return
        choice = {"message": {"role": "assistant", "content": self.answer(body)}, "finish_reason": "stop"}
        whole = {"choices": [choice | fate.get("choice", {})]} | fate.get("fields", {})
        content = fate.get("content", json.dumps(whole)).encode()
        handler.send_response(fate.get("status", 200))
        for name, value in fate.get("headers", {}).items():
            handler.send_header(name, value)
        if fate.get("cut") != "without a length":
            handler.send_header("Content-Length", str(len(content)))
        handler.end_headers()
        handler.wfile.write(content[: len(content) // 2] if fate.get("cut") else content)
