"""A site's handler in a process of its own: one message from a file, killed once its state is on disk.

python -m tests.federate.masked.killed_site FOLDER NODE [kill]
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

from flwr.app import Context, RecordDict
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.task_identity import TaskIdentity

from apfl.federate.flower import client_app
from apfl.federate.site import Site
from tests.federate.test_conversation import RUN, as_sent


def main(folder: Path, node: int, kill: bool) -> None:
    for name, value in {"_run_id": RUN, "_node_id": node, "_task_id": 1}.items():
        setattr(TaskIdentity, name, value)
    told = json.loads((folder / "message.json").read_text())
    message = inflate_object_from_contents(told["root"], {key: bytes.fromhex(x) for key, x in told["parts"].items()})
    message.metadata.__dict__["_message_id"] = told["id"]
    write = Site.write

    def killed(site: Site, terms: object, name: str, data: bytes) -> None:
        write(site, terms, name, data)
        if name == client_app.STATE:
            os.kill(os.getpid(), signal.SIGKILL)

    if kill:
        Site.write = killed
    root, parts = as_sent(client_app.app(message, Context(RUN, node, told["config"], RecordDict(), {})))
    answer = {"root": root, "parts": {key: part.hex() for key, part in parts.items()}}
    (folder / "answer.json").write_text(json.dumps(answer))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:] == ["kill"])
