"""The tools of `environment.tools` in a worker process: users' functions, and those that rlctl ships.

An instance belongs to one episode. Imports little, because the process that forks workers imports it.
"""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rlctl.user_code import load_function

#: Name that stands for a file in the arguments of a worker whose instances are those of `toolbox_class`.
TOOLBOX = "environment.tools"
PYTHON, SEARCH, MCP = "python", "search", "mcp:"
#: Seconds in which a server of tools starts.
_START_S = 30.0


@dataclass(frozen=True)
class ToolSettings:
    """What the tools of a spec need.

    Attributes:
        names: `environment.tools`.
        of_servers: name of a server of tools → names of its tools.
        corpus: file that `search` reads.
        num_results: passages that it returns.
        timeout_s, memory_mb: limits of a call of `python`.
        max_output: characters that it returns.
    """

    names: Sequence[str]
    of_servers: Mapping[str, Sequence[str]] = field(default_factory=dict)
    corpus: str = ""
    num_results: int = 3
    timeout_s: float = 5.0
    memory_mb: int = 1024
    max_output: int = 4096

    def as_text(self) -> str:
        """The settings as an argument of a process."""
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str) -> ToolSettings:
        """The settings of such an argument."""
        return cls(**json.loads(text))


def toolbox_class(settings: ToolSettings, *, loads: bool = True) -> type:
    """A class with a method for each tool; an instance has the state of an episode.

    Args:
        loads: load what calls need, such as the corpus; without it the class is good for its signatures.

    Raises:
        UsageError: a user's function cannot be imported.
        ValueError: the corpus cannot be read.
    """
    methods: dict[str, Any] = {"_settings": settings, "_index": None}
    for name in settings.names:
        if name == SEARCH and loads:
            methods["_index"] = _Index(Path(settings.corpus), settings.num_results)
        elif name.endswith(".py", 0, name.rfind(":")):
            function = load_function(name, key="environment.tools")
            methods[name.rpartition(":")[2]] = staticmethod(function)
    for server, tools in settings.of_servers.items():
        methods |= {tool: _call_of(server, tool) for tool in tools}
        if loads:
            import mcp  # noqa: F401  # before the fork
    shipped = [kind for name, kind in ((PYTHON, _Python), (SEARCH, _Search)) if name in settings.names]
    return type("Toolbox", (*shipped, _Toolbox), methods)


class _Toolbox:
    """What all tools of an episode share."""

    _settings: ToolSettings
    _index: _Index | None

    def reset(self) -> None:
        """Starts the servers of tools."""
        self._servers = {name: ToolServer(name) for name in self._settings.of_servers}
        for server in self._servers.values():
            server.start()

    def _close(self) -> None:
        """Ends what the tools of this process left; servers of tools end with the process."""


class _Python(_Toolbox):
    _session: Any = None

    def python(self, code: str) -> str:
        """Runs Python code, and returns what it prints and the value of its last line. Names are kept.

        Args:
            code: The Python code.
        """
        from rlctl.reward.sandbox.run_program import Limits, NotRun, Session, SessionEnded

        settings = self._settings
        if self._session is None:
            self._session = Session(Limits(settings.timeout_s, settings.memory_mb))
        try:
            output: str = self._session.run(code, settings.max_output)
        except (SessionEnded, NotRun) as ended:
            self._session = None
            why = str(ended) or f"it took longer than {settings.timeout_s:g} s, or ended itself"
            return f"Error: the interpreter was started again, its names are lost: {why}"
        return output or "(no output)"

    def _close(self) -> None:
        if self._session is not None:
            self._session.close()


class _Search(_Toolbox):
    def search(self, query: str) -> str:
        """Searches a collection of texts, and returns the passages that fit best.

        Args:
            query: Words to search for.
        """
        if self._index is None:
            raise AssertionError("the class was made without its corpus")
        return self._index.passages(query)


class _Index:
    """A corpus, searched by BM25.

    Raises:
        ValueError: the file has no texts.
    """

    def __init__(self, file: Path, num_results: int) -> None:
        import bm25s

        self._texts = texts_of(file)
        self._num_results = num_results
        self._bm25s = bm25s
        self._index = bm25s.BM25()
        self._index.index(self._words(self._texts), show_progress=False)

    def _words(self, texts: Sequence[str]) -> Any:
        return self._bm25s.tokenize(list(texts), stopwords="en", show_progress=False)

    def passages(self, query: str) -> str:
        """The best passages, with numbers."""
        count = min(self._num_results, len(self._texts))
        places, scores = self._index.retrieve(self._words([query]), k=count, show_progress=False)
        best = [self._texts[place] for place, score in zip(places[0], scores[0], strict=True) if score > 0]
        return "\n\n".join(f"[{number}] {text}" for number, text in enumerate(best, 1)) or "nothing was found"


def texts_of(file: Path) -> list[str]:
    """The texts of a corpus: JSON lines or Parquet with the columns `text` and maybe `title`, or paragraphs.

    Raises:
        ValueError: there are none.
    """
    rows: list[Mapping[str, Any]]
    if file.suffix == ".parquet":
        import pyarrow.parquet

        rows = pyarrow.parquet.read_table(file).to_pylist()
    elif file.suffix in (".jsonl", ".ndjson"):
        rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    else:
        paragraphs = file.read_text(encoding="utf-8").split("\n\n")
        rows = [{"text": paragraph.strip()} for paragraph in paragraphs if paragraph.strip()]
    for number, row in enumerate(rows, 1):
        if not isinstance(row, Mapping) or not isinstance(row.get("text"), str):
            raise ValueError(f"{file}: row {number} has no text in the field `text`")
    if not rows:
        raise ValueError(f"{file}: there are no texts")
    return ["\n".join(filter(None, [str(row.get("title") or ""), row["text"]])) for row in rows]


def _call_of(server: str, tool: str) -> Callable[..., str]:
    def call(self: Any, **arguments: Any) -> str:
        return str(self._servers[server].call(tool, arguments))

    return call


class ToolServer:
    """A server that speaks the Model Context Protocol: a command line, which is started, or a local URL.

    Its client lives in a thread of its own, with the process: both end with the episode.

    Args:
        name: as in `environment.tools`.
    """

    def __init__(self, name: str) -> None:
        self._target = name.removeprefix(MCP)
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._problem = ""

    def start(self) -> None:
        """Connects.

        Raises:
            ConnectionError: it cannot be reached, or does not start.
        """
        threading.Thread(target=self._loop.run_until_complete, args=(self._serve(),), daemon=True).start()
        if not self._ready.wait(_START_S):
            raise ConnectionError(f"the server of tools {self._target} did not start within {_START_S:g} s")
        if self._problem:
            raise ConnectionError(f"the server of tools {self._target}: {self._problem}")

    async def _serve(self) -> None:
        try:
            async with connected(self._target) as self._client:
                self._ready.set()
                await asyncio.Event().wait()
        except BaseException as error:
            self._problem = _cause(error)
            self._ready.set()

    def call(self, tool: str, arguments: Mapping[str, Any]) -> str:
        """The text of a tool's result.

        Raises:
            RuntimeError: the tool says that it failed.
        """
        asked = self._client.call_tool(tool, dict(arguments))
        result = asyncio.run_coroutine_threadsafe(asked, self._loop).result()
        parts = [getattr(part, "text", f"({part.type} is not shown)") for part in result.content]
        if result.is_error:
            raise RuntimeError("\n".join(parts))
        return "\n".join(parts)


def _cause(error: BaseException) -> str:
    """The first error of a group, as text."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"


def connected(target: str) -> Any:
    """A context with the client of a server: a URL, or a command line that it starts."""
    from mcp import Client, StdioServerParameters, stdio_client

    if target.startswith("http:"):
        return Client(target)
    program, *arguments = shlex.split(target)
    parameters = StdioServerParameters(command=program, args=arguments, env=dict(os.environ), cwd=None)
    return Client(stdio_client(parameters))  # mcp 2.0, which verifiers 0.4 requires, takes transports only


async def _tools_of(target: str) -> list[Any]:
    async with connected(target) as client:
        return list((await client.list_tools()).tools)


def served_tools(name: str) -> list[dict[str, Any]]:
    """Schemas of a server's tools, as chat completions have them; the server is started and ended.

    Raises:
        ConnectionError: it cannot be reached, or does not start.
    """
    found: list[Any] = []
    problems: list[str] = []

    def ask() -> None:
        try:
            found.extend(asyncio.run(asyncio.wait_for(_tools_of(name.removeprefix(MCP)), _START_S)))
        except BaseException as error:
            problems.append(_cause(error))

    thread = threading.Thread(target=ask)  # this one may have an event loop
    thread.start()
    thread.join()
    if problems:
        raise ConnectionError(problems[0])
    return [
        {
            "type": "function",
            "function": {
                "name": tool.name,
                "description": tool.description or "",
                "parameters": tool.input_schema,
            },
        }
        for tool in found
    ]
