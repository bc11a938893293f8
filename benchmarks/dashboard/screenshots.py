"""Screenshots for docs/dashboard.md: every page of real runs of a tiny model.

    python benchmarks/dashboard/screenshots.py                # makes the runs first; three minutes
    python benchmarks/dashboard/screenshots.py --runs FOLDER  # uses runs of demo_runs.py

It needs headless Chromium and the packages of requirements/browser.txt. Few colours keep the
pictures small.
"""

from __future__ import annotations

import argparse
import io
import shutil
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path += [str(ROOT)]
PICTURES = (
    ("runs", 1280, "light", "runs", ""),
    ("curves", 1280, "light", "curves", "run=first&runs=second"),
    ("graph", 1280, "dark", "graph", "run=live"),
    ("timeline", 1280, "light", "timeline", "run=ahead&x=12~14"),
    ("ranks", 1280, "light", "timeline", "run=ranks&x=6~8&ranks=rollout,actor,reward"),
    ("samples", 1280, "light", "samples", "run=ahead&by=version"),
    ("conversation", 1280, "light", "samples", "run=dialogues&by=logprob"),
    ("buffer", 1280, "light", "buffer", "run=live"),
    ("workers", 1280, "light", "workers", "run=ranks&worker=rollout%5B1%5D"),
    ("weights", 1280, "dark", "weights", "run=ahead"),
    ("compare", 1280, "light", "compare", "run=first&with=second"),
    ("alerts", 1280, "light", "alerts", "run=first"),
    ("phone", 390, "dark", "curves", "run=first"),
)
"""Name, width, scheme, page, and query."""
HEIGHT = 800
COLOURS = 256


def take(browser: Any, address: str, width: int, scheme: str, page: str, params: str) -> bytes:
    """Take one picture, once the page shows its data."""
    context = browser.new_context(viewport={"width": width, "height": HEIGHT}, color_scheme=scheme)
    window = context.new_page()
    window.goto(address)
    window.wait_for_selector("#main[data-shows]")
    window.evaluate(
        "asked => { delete main.dataset.shows; location.hash = asked; }", f"#{page}?{params}"
    )
    window.wait_for_selector(f"#main[data-shows*='\"{page}\"']")
    window.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
    picture = window.screenshot()
    context.close()
    return picture


def write(picture: bytes, path: Path) -> None:
    from PIL import Image

    image = (
        Image.open(io.BytesIO(picture))
        .convert("RGB")
        .quantize(COLOURS, Image.Quantize.MEDIANCUT, kmeans=3, dither=Image.Dither.NONE)
    )
    image.save(path, optimize=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=Path, help="folder of demo_runs.py with a live run")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "dashboard")
    arguments = parser.parse_args()
    from playwright.sync_api import sync_playwright  # pyright: ignore[reportMissingImports]

    from weft.dashboard.server.serving import Serving

    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    folder = arguments.runs or Path(tempfile.mkdtemp(prefix="weft-screenshots-"))
    demo = [sys.executable, str(Path(__file__).parent / "demo_runs.py"), str(folder), "--only"]
    live = None
    if arguments.runs is None:
        subprocess.run(
            [*demo, "first", "second", "ahead", "ranks", "dialogues", "killed", "failed"],
            check=True,
            stdout=subprocess.DEVNULL,
        )
        live = subprocess.Popen([*demo, "live", "--here"], stdout=subprocess.PIPE, text=True)
        assert live.stdout is not None
        for line in live.stdout:
            if line.startswith("step 12/"):
                break
    serving = Serving.at(folder)
    threading.Thread(target=serving.serve, daemon=True).start()
    arguments.out.mkdir(exist_ok=True)
    try:
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=chromium)
            for name, width, scheme, page, params in PICTURES:
                path = arguments.out / f"{name}.png"
                write(take(browser, serving.address, width, scheme, page, params), path)
                print(f"{path}  {path.stat().st_size:,} bytes")
            browser.close()
    finally:
        if live is not None:
            live.kill()
            live.wait()
        if arguments.runs is None:
            shutil.rmtree(folder)


if __name__ == "__main__":
    main()
