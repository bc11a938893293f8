"""A client for a dashboard, without a network."""

from pathlib import Path

from starlette.testclient import TestClient

from weft.dashboard.reading.catalogue import Catalogue
from weft.dashboard.server.app import new_app
from weft.dashboard.server.safety import Access

TOKEN = "a-token"


def client_of(root: Path) -> TestClient:
    """Return a client with the token of a dashboard over this folder."""
    app = new_app(Catalogue(root), Access(TOKEN))
    return TestClient(
        app, base_url="http://127.0.0.1:8000", headers={"authorization": f"Bearer {TOKEN}"}
    )
