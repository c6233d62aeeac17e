"""New processes without the seconds in which they would import torch.

`run(code)` runs code in a copy of a process that has imported torch and nothing else, by fork. What the code prints and
how it ends come back as from `subprocess.run`.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path

ROOT = Path(__file__).parent.parent
SECONDS = 300  # the longest that code may take


def run(code: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run code with arguments and environment variables of its own, which torch's import must not read."""
    source = _source()
    assert source.stdin is not None
    assert source.stdout is not None
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        paths = [f"/proc/{os.getpid()}/fd/{file.fileno()}" for file in (out, err)]
        source.stdin.write(json.dumps([code, arguments, variables, *paths]) + "\n")
        source.stdin.flush()
        status = int(source.stdout.readline())
        return subprocess.CompletedProcess(code, status, *(Path(path).read_text() for path in paths))


@functools.cache
def _source() -> subprocess.Popen[str]:
    """Return the process that is copied. It ends with this one, whose end closes its input."""
    environment = {
        **os.environ,
        "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'recipes'}",
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
    }
    command = [sys.executable, __file__]
    return subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def _serve() -> None:
    """Run the code of each line that comes in, in a copy of this process."""
    import torch  # noqa: F401

    while line := sys.stdin.readline():
        code, arguments, variables, *paths = json.loads(line)
        child = os.fork()
        if child:
            print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
            continue
        for path, stream in zip(paths, (1, 2), strict=True):
            os.dup2(os.open(path, os.O_WRONLY), stream)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.environ |= variables
        sys.argv[1:] = arguments
        sys.path.pop(0)  # the folder of this file
        signal.alarm(SECONDS)
        status = 1
        try:
            exec(compile(code, "<code>", "exec"), {"__name__": "__main__"})
            status = 0
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else int(end.code is not None)
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    _serve()
