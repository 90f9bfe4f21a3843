"""Every place of the package that lets other processes connect, and what SECURITY.md says about it."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
#: Names with which Python, torch, vLLM and web frameworks open a port or a socket for others.
OPENS = {
    *("bind", "listen", "create_server", "start_server", "start_unix_server", "serve_forever"),
    *("HTTPServer", "ThreadingHTTPServer", "TCPServer", "UDPServer", "UnixStreamServer", "Listener"),
    *("TCPStore", "FileStore", "HashStore", "init_process_group", "init_rpc", "ProcessGroupGloo"),
    *("ncclGetUniqueId", "LLM", "BaseManager", "SyncManager", "run_app", "make_server", "elastic_launch"),
    *("webbrowser", "uvicorn", "flask", "aiohttp", "fastapi", "starlette", "websockets", "zmq", "xmlrpc"),
}
#: File and name → the words of SECURITY.md that state who can connect; "": nobody can.
KNOWN = {
    ("doctor/checks.py", "create_server"): "",  # whether a port is free; closed at once
    ("processes.py", "bind"): "",  # the same
    ("user_code.py", "bind"): "",  # of arguments to a signature
    ("environment/endpoint.py", "Listener"): "an agent function's endpoint",  # rlctl's own class
    ("environment/connections.py", "create_server"): "an agent function's endpoint",
    ("cli/report.py", "serve_forever"): "whoever knows the random key in its address",
    ("engine/ranks.py", "FileStore"): "a file in a directory of mode 0700",
    ("engine/ranks.py", "HashStore"): "",  # memory of this process
    ("engine/ranks.py", "init_process_group"): "gloo and NCCL",
    ("rollout/vllm.py", "LLM"): "vLLM in the trainer's processes",
    ("rollout/weight_broadcast.py", "FileStore"): "a file in a directory of mode 0700",
    ("rollout/weight_broadcast.py", "TCPStore"): "weights by broadcast over gloo",
    ("rollout/weight_broadcast.py", "create_server"): "weights by broadcast over gloo",
    ("rollout/weight_broadcast.py", "ProcessGroupGloo"): "weights by broadcast over gloo",
    ("rollout/weight_broadcast.py", "ncclGetUniqueId"): "weights by broadcast over NCCL",
}


def opened() -> set[tuple[str, str]]:
    """File and name of every call of `OPENS`, and of every import of one of its modules."""
    found = set()
    for path in (ROOT / "rlctl").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names: list[str] = []
            if isinstance(node, ast.Call):
                names = [getattr(node.func, "attr", getattr(node.func, "id", ""))]
            elif isinstance(node, ast.Import):
                names = [alias.name.partition(".")[0] for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [(node.module or "").partition(".")[0]]
            found |= {(str(path.relative_to(ROOT / "rlctl")), name) for name in OPENS.intersection(names)}
    return found


def test_every_endpoint_is_known_and_described() -> None:
    assert opened() - KNOWN.keys() == set()
    text = " ".join((ROOT / "SECURITY.md").read_text(encoding="utf-8").split())
    assert [words for words in KNOWN.values() if words not in text] == []
