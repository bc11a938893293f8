"""Access to the dashboard, restrictions of its pages, and escaping of a run's texts."""

import json
import re
from pathlib import Path

import pytest
from served import TOKEN, client_of  # pyright: ignore[reportMissingImports]
from starlette.testclient import TestClient

from weft.dashboard.server.safety import Access
from weft.dashboard.server.serving import Serving
from weft.dataflow.errors import UserError

API = (
    "/api/runs",
    "/api/run?run=one",
    "/api/curves?runs=one&names=step",
    "/api/events",
    "/",
    "/static/index.html",
)


@pytest.mark.parametrize("address", API)
def test_requests_without_the_token_are_refused(client: TestClient, address: str):
    for headers in (
        {"authorization": ""},
        {"authorization": "Bearer wrong"},
        {"authorization": "", "cookie": "weft=1"},
    ):
        said = client.get(address, headers=headers)
        assert said.status_code == 401 and "token" in said.text and "one" not in said.text
    assert (
        client.get(
            f"{address}{'&' if '?' in address else '?'}token=wrong", headers={"authorization": ""}
        ).status_code
        == 401
    )


def test_the_first_visit_sets_a_cookie_and_redirects_without_the_token(runs: Path):
    visitor = client_of(runs)
    del visitor.headers["authorization"]
    first = visitor.get(f"/?token={TOKEN}&x=%22%3E%3Cscript%3E", follow_redirects=False)
    cookie = first.headers["set-cookie"]
    assert (
        "HttpOnly" in cookie and re.search("samesite=strict", cookie, re.IGNORECASE) and TOKEN in cookie
    )
    assert TOKEN not in first.text and "<script" not in first.text, "the page goes on without it"
    assert 'content="0;url=/?x=%22%3E%3Cscript%3E"' in first.text
    assert visitor.get("/api/runs").status_code == 200


def test_a_welcome_leads_to_this_address_alone(runs: Path):
    said = client_of(runs).get(f"http://127.0.0.1:8000//evil.example/?token={TOKEN}")
    assert 'url=/evil.example/"' in said.text


@pytest.mark.parametrize(
    "host", ["evil.example", "127.0.0.1.evil.example", "10.1.2.3", "", "localhost.evil.example:8000"]
)
def test_a_host_of_another_name_is_refused(client: TestClient, host: str):
    assert client.get("/api/runs", headers={"host": host}).status_code == 421


@pytest.mark.parametrize("host", ["localhost:9999", "127.0.0.1", "[::1]:8000"])
def test_a_tunnel_may_have_another_port(client: TestClient, host: str):
    assert client.get("/api/runs", headers={"host": host}).status_code == 200


def test_other_sites_may_not_read_or_ask(client: TestClient):
    body = {"run": "one", "query": "select 1"}
    for headers in (
        {"origin": "http://evil.example"},
        {"origin": "null"},
        {"origin": "http://127.0.0.1:9"},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site", "origin": "http://127.0.0.1:8000"},
    ):
        assert client.post("/api/sql", json=body, headers=headers).status_code == 403
    assert (
        client.get(
            "/api/runs", headers={"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors"}
        ).status_code
        == 403
    )
    assert (
        client.get(
            "/", headers={"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}
        ).status_code
        == 200
    )
    own = {"origin": "http://127.0.0.1:8000", "sec-fetch-site": "same-origin"}
    assert client.post("/api/sql", json=body, headers=own).status_code == 200


@pytest.mark.parametrize(
    "address", [*API[:3], "/api/none", "/static/none", "/api/run?run=none", "/nothing"]
)
def test_every_answer_has_the_policy(client: TestClient, address: str):
    for said in (client.get(address), client.get(address, headers={"host": "evil.example"})):
        policy = dict(
            part.strip().split(" ", 1) for part in said.headers["content-security-policy"].split(";")
        )
        assert policy["default-src"] == policy["frame-ancestors"] == policy["base-uri"] == "'none'"
        assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
        assert "unsafe" not in said.headers["content-security-policy"]
        assert (
            said.headers["x-content-type-options"] == "nosniff"
            and said.headers["referrer-policy"] == "no-referrer"
        )


def test_pages_have_no_script_in_themselves():
    pages = Path(__file__).resolve().parents[3] / "dashboard" / "pages"
    text = (pages / "index.html").read_text()
    assert (
        not re.search(r"<script(?![^>]*\bsrc=)[^>]*>\s*\S", text)
        and not re.search(r"\son\w+\s*=", text)
        and " style=" not in text
    )
    assert "https://" not in re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL), (
        "nothing comes from the network"
    )


ELSEWHERE = [
    "../one",
    "..",
    "/etc",
    "one/../../one",
    "one\0",
    "%2e%2e",
    "one/",
    ".",
    "",
    "two/checkpoints",
    "one;two",
]


@pytest.mark.parametrize("name", ELSEWHERE)
def test_a_name_of_a_run_is_looked_up_and_leads_nowhere_else(client: TestClient, name: str):
    for address in ("run", "graph", "timeline", "buffer", "workers", "samples", "weights"):
        said = client.get(f"/api/{address}", params={"run": name})
        assert said.status_code == 404 and said.json()["error"] == "gone", (address, said.text)


def test_a_name_of_a_log_is_looked_up_too(client: TestClient, runs: Path):
    logs = runs / "one" / "logs"
    (logs / "actor_0.log").write_text("\x1b[31mred\x1b[0m <script>\n")
    for name in ("actor[0]", "actor_0.log"):
        assert (
            client.get("/api/log", params={"run": "one", "worker": name})
            .json()["text"]
            .startswith("\x1b[31mred")
        )
    for name in ("../config.json", "/etc/passwd", "..", "actor[0]/../../config.json", "", "\0"):
        assert client.get("/api/log", params={"run": "one", "worker": name}).status_code == 400
    (logs / "actor_0.log").unlink()


@pytest.mark.parametrize(
    "path",
    [
        "/static/../app.py",
        "/static/%2e%2e/server/app.py",
        "/static//etc/passwd",
        "/static/vendor/..%2f..%2fapp.py",
    ],
)
def test_static_files_are_those_of_the_pages(client: TestClient, path: str):
    assert client.get(path).status_code == 404


def test_only_loopback_may_do_without_a_token(tmp_path: Path):
    with pytest.raises(
        UserError, match=r"--host 0\.0\.0\.0 without a token would show the runs to anyone"
    ):
        Serving.at(tmp_path, host="0.0.0.0", token="")
    assert Access("t").knows_host("10.0.0.1") is False and Access("t", any_address=True).knows_host(
        "10.0.0.1:80"
    )
    assert not Access("t", any_address=True).knows_host("evil.example"), (
        "names of others may lead to any address"
    )


def test_requests_to_a_run_need_a_header_that_no_form_sends(client: TestClient):
    for address, body in (("stop", {"run": "one"}), ("stacks", {"run": "one", "worker": "actor[0]"})):
        assert "x-weft-stop" in client.post(f"/api/{address}", json=body).json()["message"]
        said = client.post(f"/api/{address}", json=body, headers={"x-weft-stop": "yes"})
        assert said.status_code == 400 and "is not running: it is done" in said.json()["message"]
        form = {"x-weft-stop": "yes", "content-type": "application/x-www-form-urlencoded"}
        assert client.post(f"/api/{address}", content=b"run=one", headers=form).status_code == 400


# SQL


@pytest.mark.parametrize(
    "query",
    [
        "select * from read_csv('/etc/passwd')",
        "select * from '/etc/passwd'",
        "copy (select 1) to '/tmp/weft-stolen.csv'",
        "attach '/tmp/weft-stolen.db'",
        "install httpfs",
        "load httpfs",
        "set enable_external_access = true",
        "select getenv('HOME')",
        "pragma database_list; select * from glob('/*')",
    ],
)
def test_a_query_reads_the_tables_of_its_run_alone(client: TestClient, query: str):
    said = client.post("/api/sql", json={"run": "one", "query": query})
    assert said.status_code == 400, said.text
    assert (
        "root:" not in said.text
        and not Path("/tmp/weft-stolen.csv").exists()
        and not Path("/tmp/weft-stolen.db").exists()
    )


def test_a_query_has_limits_of_rows_and_time(client: TestClient, monkeypatch: pytest.MonkeyPatch):
    said = client.post("/api/sql", json={"run": "one", "query": "select range from range(5000)"}).json()
    assert len(said["rows"]) == 1000 and said["cut"] and said["columns"] == ["range"]
    monkeypatch.setattr("weft.dashboard.reading.run_pages.SQL_S", 0.2)  # waited out
    slow = client.post(
        "/api/sql",
        json={"run": "one", "query": "select count(*) from range(100000000000) a, range(1000) b"},
    )
    assert slow.status_code == 400 and "stopped after 0.2 s" in slow.json()["message"]


def test_a_query_may_ask_for_tokens_and_for_two_columns_of_one_name(client: TestClient):
    query = "select sample_id, response_ids, sample_id from samples order by sample_id limit 1"
    said = client.post("/api/sql", json={"run": "one", "query": query}).json()
    [[id, tokens, again]] = said["rows"]
    assert (
        id == again
        and isinstance(tokens, list)
        and said["columns"] == ["sample_id", "response_ids", "sample_id_1"]
    )


def test_a_request_that_is_too_large_is_refused(client: TestClient):
    body = json.dumps({"run": "one", "query": "x" * (2 << 20)})
    assert (
        client.post("/api/sql", content=body, headers={"content-type": "application/json"}).status_code
        == 413
    )


def test_a_request_that_does_not_say_its_length_is_refused(client: TestClient):
    asked = client.post(
        "/api/sql", content=iter([b"x" * 10]), headers={"content-type": "application/json"}
    )
    assert asked.status_code == 411


@pytest.mark.parametrize("port", [-1, 65536, 70000])
def test_a_port_that_is_none_is_refused(tmp_path: Path, port: int):
    with pytest.raises(UserError, match=f"--port {port} is not a port"):
        Serving.at(tmp_path, port=port)
