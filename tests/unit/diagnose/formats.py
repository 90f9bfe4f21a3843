"""Writes one table of metrics in every format that is read."""

import csv
import gzip
import json
import math
import struct

import pyarrow as pa
import pyarrow.parquet as pq

from tests.simulated_logs import writers


def _present(row):
    return {key: value for key, value in row.items() if value is not None}


def flat_jsonl(rows, path):
    """NaN and infinities by name, as rlctl writes them."""
    path.write_text("".join(json.dumps(_present(row)) + "\n" for row in rows))


def verl_file_logger(rows, path):
    lines = [{"step": row["step"], "data": {k: v for k, v in row.items() if k != "step"}} for row in rows]
    path.write_text("".join(json.dumps({**x, "data": _present(x["data"])}) + "\n" for x in lines))


def verl_console(rows, path):
    lines = writers.verl_console(map(_present, rows), "\x1b[36m(TaskRunner pid=12, ip=10.0.0.1)\x1b[0m ")
    path.write_text(lines.replace("\n", "\n(TaskRunner pid=12) prose\n"))


def printed_dictionaries(rows, path):
    path.write_text("".join(f"{_present(row)!r}\n" for row in rows))


def trainer_state(rows, path):
    path.write_text(writers.trainer_state([_present(row) for row in rows]))


def list_of_rows(rows, path):
    path.write_text(json.dumps(rows))


def lists_by_column(rows, path):
    path.write_text(json.dumps({key: [row[key] for row in rows] for key in rows[0]}))


def by_index(rows, path):
    """As pandas writes a frame."""
    path.write_text(json.dumps({key: {str(i): row[key] for i, row in enumerate(rows)} for key in rows[0]}))


def by_step(rows, path):
    """As NeMo-RL dumps its TensorBoard logs."""
    names = [key for key in rows[0] if key != "step"]
    series = {k: {str(r["step"]): r[k] for r in rows if r[k] is not None} for k in names}
    path.write_text(json.dumps(series))


def comma_separated(rows, path, delimiter=","):
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), delimiter=delimiter)
        writer.writeheader()
        writer.writerows(rows)


def tab_separated(rows, path):
    comma_separated(rows, path, "\t")


def wandb_export(rows, path):
    """One run's column per metric, with the range beside it."""
    names = [key for key in rows[0] if key != "step"]
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["Step", *(f"my - run - {k}{x}" for k in names for x in ("", "__MIN", "__MAX"))])
        for row in rows:
            writer.writerow([row["step"], *(v for k in names for v in (row[k], -1, 1e9))])


def parquet(rows, path):
    columns = {key: [row[key] for row in rows] for key in rows[0]}
    arrays = {k: pa.array(v, pa.int64() if k == "step" else pa.float64()) for k, v in columns.items()}
    pq.write_table(pa.table({**arrays, "note": ["text"] * len(rows)}), path)


def tensorboard(rows, path):
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary

    events = [Event(file_version="brain.Event:2")]
    for row in rows:
        for key, value in _present(row).items():
            if key != "step":
                summary = Summary(value=[Summary.Value(tag=key, simple_value=value)])
                events.append(Event(step=row["step"], summary=summary))
    with path.open("wb") as file:
        for event in events:
            content = event.SerializeToString()
            file.write(struct.pack("<Q", len(content)) + b"crc." + content + b"crc.")


def wandb_records(contents, path):
    """LevelDB's log format, written byte by byte, so that records fall on block borders."""
    out = bytearray(b":W&B" + b"\xe1\xbe\x00")
    for whole in contents:
        kind, content = "first", whole
        while content or kind == "first":
            left = 32768 - len(out) % 32768
            if left < 7:
                out.extend(b"\0" * left)
                left = 32768
            part, content = content[: left - 7], content[left - 7 :]
            code = {("first", False): 2, ("first", True): 1, ("next", False): 3, ("next", True): 4}
            out.extend(b"crc." + struct.pack("<HB", len(part), code[kind, not content]) + part)
            kind = "next"
    path.write_bytes(bytes(out))


def wandb_file(rows, path):
    from wandb.proto.wandb_internal_pb2 import Record

    config = Record()
    item = config.run.config.update.add()
    item.key, item.value_json = "actor", '{"lr": 0.5}'
    contents = [config.SerializeToString()]
    for number, row in enumerate(rows):
        record = Record()
        for key, value in _present(row).items():
            item = record.history.item.add()
            item.nested_key.append("_step" if key == "step" else key)
            item.value_json = json.dumps(value)
        filler = record.history.item.add()
        filler.key, filler.value_json = "text", json.dumps("x" * (number % 7) * 5000)
        contents.append(record.SerializeToString())
    wandb_records(contents, path)


def gzipped(rows, path):
    flat_jsonl(rows, path)
    path.write_bytes(gzip.compress(path.read_bytes()))


ALL = [
    *(flat_jsonl, verl_file_logger, verl_console, printed_dictionaries, trainer_state, list_of_rows),
    *(lists_by_column, by_index, by_step, comma_separated, tab_separated, wandb_export, parquet),
    *(tensorboard, wandb_file, gzipped),
]
#: TensorBoard keeps single precision.
IS_SINGLE = {tensorboard}


def is_finite(value):
    return value is not None and math.isfinite(value)
