"""A launcher that dies at once: `orphans.py` starts two ranks that listen, and `orphans.py RANK` is one of them."""

import os
import subprocess
import sys
import time

from project.run.signals import stop_signal

if __name__ == "__main__":
    if len(sys.argv) > 1:
        stop_signal._rank = int(sys.argv[1])
        stop_signal.install()
        print(f"{sys.argv[1]} {os.getpid()}", flush=True)
        time.sleep(60)
    else:
        environment = {**os.environ, "TORCHELASTIC_RUN_ID": "orphans"}
        for rank in range(2):
            command = [sys.executable, __file__, str(rank)]
            with_pipe = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
            assert with_pipe.stdout is not None
            print(with_pipe.stdout.readline(), end="", flush=True)
        os._exit(0)
