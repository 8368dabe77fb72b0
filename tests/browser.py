"""A headless Chromium that a test drives through its debugging pipe; it needs no library."""

import json
import os
import shutil
import subprocess
import time
from base64 import b64decode
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")

# All text that is on the page, within shadow roots too, and how many pictures are loaded there.
LOOK = """(() => {
  const words = []; let pictures = 0;
  const walk = node => {
    if (node.nodeType === Node.TEXT_NODE) words.push(node.textContent);
    if (node.tagName === 'IMG' && node.naturalWidth > 100) pictures += 1;
    if (node.tagName === 'STYLE' || node.tagName === 'SCRIPT') return;
    if (node.shadowRoot) walk(node.shadowRoot);
    node.childNodes.forEach(walk);
  };
  walk(document.body);
  return {words: words.join(' ').replace(/\\s+/g, ' '), pictures};
})()"""

CLICK = """(text => {
  const find = node => {
    if (node.tagName === 'BUTTON' && node.textContent.trim().match('^' + text + '(?![a-z_])')) return node;
    for (const child of [...(node.shadowRoot ? [node.shadowRoot] : []), ...node.childNodes]) {
      const found = find(child);
      if (found) return found;
    }
  };
  const button = find(document.body);
  if (button) { button.click(); button.scrollIntoView(); }
  return !!button;
})(%s)"""


class Browser:
    """One page of Chromium. Use it as a context; at the end the browser is gone.

    Args:
        profile: A fresh folder for what it stores.
    """

    def __init__(self, profile: Path) -> None:
        assert CHROMIUM is not None
        flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run"]
        more = ["--remote-debugging-pipe", "--window-size=1500,1100", f"--user-data-dir={profile}", "about:blank"]
        to_read, self._to = os.pipe()
        self._from, to_write = os.pipe()

        # Chromium expects its debugger at 3 and 4.
        at_3_and_4 = ["bash", "-c", f'exec "$@" 3<&{to_read} 4>&{to_write}', "bash"]
        self._process = subprocess.Popen(
            [*at_3_and_4, CHROMIUM, *flags, *more],
            pass_fds=(to_read, to_write),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(to_read)
        os.close(to_write)
        self._number, self._received, self._session = 0, b"", ""

    def __enter__(self) -> "Browser":
        page = next(t for t in self._ask("Target.getTargets")["targetInfos"] if t["type"] == "page")
        attached = self._ask("Target.attachToTarget", targetId=page["targetId"], flatten=True)
        self._session = attached["sessionId"]
        return self

    def __exit__(self, *args: object) -> None:
        os.killpg(self._process.pid, 9)
        self._process.wait()
        os.close(self._to)
        os.close(self._from)

    def open(self, url: str) -> None:
        """Go to a page; one that differs after its # alone is loaded anew too."""
        self._ask("Page.navigate", url="about:blank")
        self._ask("Page.navigate", url=url)

    def look(self) -> tuple[str, int]:
        """Return the words on the page, and the number of its pictures that are loaded."""
        found = self.run(LOOK) or {"words": "", "pictures": 0}  # nothing yet
        return found["words"], found["pictures"]

    def click(self, text: str) -> None:
        """Click on the button whose text begins so."""
        assert self.run(CLICK % json.dumps(text)), f"no button {text}"

    def run(self, script: str) -> Any:
        """Return what a script in the page gives."""
        return self._ask("Runtime.evaluate", expression=script, returnByValue=True)["result"].get("value")

    def wait_for(self, *words: str, pictures: int = 0, seconds: float = 60) -> str:
        """Wait until all words, and so many pictures, are on the page; return its words."""
        end = time.monotonic() + seconds
        while True:
            text, loaded = self.look()
            missing = [word for word in words if word.lower() not in text.lower()]
            if not missing and loaded >= pictures:
                return text
            assert time.monotonic() < end, f"{missing} not there, {loaded} of {pictures} pictures: {text[:3000]}"
            time.sleep(0.5)

    def screenshot(self, path: Path) -> None:
        """Save what is seen."""
        time.sleep(1)  # for what slides or fades in
        path.write_bytes(b64decode(self._ask("Page.captureScreenshot")["data"]))

    def _ask(self, method: str, **parameters: Any) -> Any:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = json.loads(self._line())
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]

    def _line(self) -> bytes:
        while b"\0" not in self._received:
            some = os.read(self._from, 1 << 20)
            assert some, "the browser is gone"
            self._received += some
        line, _, self._received = self._received.partition(b"\0")
        return line
