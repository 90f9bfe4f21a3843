"""Runs a command with a judge that needs no model: it prefers short responses. To try `reward.name=judge`.

python examples/judge_stub.py rlctl train … reward.name=judge reward.judge.model=stub reward.judge.url={url}
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Judge(BaseHTTPRequestHandler):
    """Answers chat completions as rlctl's questions ask."""

    def do_POST(self) -> None:
        """Scores the response, or each response of a group."""
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        asked = body["messages"][-1]["content"]
        mark = re.findall(r'"mark": "(\w+)"', asked)[-1]
        parts = re.findall(
            rf"^(Response|response \d+):\n{mark}\n(.*?)\n{mark}$", asked, re.MULTILINE | re.DOTALL
        )
        scores = {name: 1 / (1 + len(text)) for name, text in parts}
        said: dict[str, object] = {"mark": mark, "scores": scores}
        if "Response" in scores:
            said = {"mark": mark, "score": 10 * scores["Response"]}
        message = {"role": "assistant", "content": f"Short is good.\n{json.dumps(said)}"}
        data = json.dumps({"choices": [{"message": message, "finish_reason": "stop"}]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        """Says nothing."""


def main() -> int:
    """Runs the command with the server's address in place of `{url}`."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Judge) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/v1"
        code = subprocess.run([word.replace("{url}", url) for word in sys.argv[1:]], check=False).returncode
        server.shutdown()
    return code


if __name__ == "__main__":
    sys.exit(main())
