"""Two hosts on one machine: network namespaces with addresses of their own, joined by a cable that can be pulled."""

import contextlib
import os
import subprocess
import sys
from types import TracebackType

NAMES = (f"host0-{os.getpid()}", f"host1-{os.getpid()}")
CARDS = ("t0", "t1")
ADDRESSES = ("10.231.0.1", "10.231.0.2")


def _ip(*arguments: str, check: bool = True) -> None:
    subprocess.run(["ip", *arguments], check=check, capture_output=True, timeout=20)


def cannot() -> str:
    """Why this machine has no such hosts; empty where it has."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "only Linux's root can make network namespaces"
    try:
        with TwoHosts():
            return ""
    except (OSError, subprocess.SubprocessError) as error:
        return f"network namespaces are not allowed here, or iproute2 is missing: {error}"


class TwoHosts:
    """While entered, the two are there, and joined."""

    def __enter__(self) -> "TwoHosts":
        try:
            for name in NAMES:
                _ip("netns", "add", name)
            _ip("-n", NAMES[0], "link", "add", CARDS[0], "type", "veth", "peer", "name", CARDS[1], "netns", NAMES[1])
            for name, card, address in zip(NAMES, CARDS, ADDRESSES, strict=True):
                _ip("-n", name, "addr", "add", f"{address}/24", "dev", card)
                _ip("-n", name, "link", "set", "lo", "up")
                _ip("-n", name, "link", "set", card, "up")
        except BaseException:
            with contextlib.suppress(OSError):
                self.__exit__(None, None, None)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        for name in NAMES:
            _ip("netns", "del", name, check=False)

    def pull(self) -> None:
        """Pull the cable."""
        _ip("-n", NAMES[1], "link", "set", CARDS[1], "down")

    def plug_in(self) -> None:
        """Plug it in again."""
        _ip("-n", NAMES[1], "link", "set", CARDS[1], "up")

    @staticmethod
    def on(host: int) -> list[str]:
        """The words that make a command run on one of them."""
        return ["ip", "netns", "exec", NAMES[host]]
