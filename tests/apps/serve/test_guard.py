"""Access control: hosts, origins, keys and bodies, one by one."""

import asyncio
import base64
import socket
from typing import Any

import pytest
from fakes.raw_http import answer, ask, connect, error_code, request, served, until
from helpers.refusals import refuses

pytest.importorskip("uvicorn", reason="NOT RUN: uvicorn is not installed")

KEY = "sk-Gu4rd"
LOOPBACK = ("localhost", "127.0.0.1", "[::1]")


async def length(scope, receive, send):
    """Says how long the body is that it was given in one piece."""
    message = await receive()
    assert not message["more_body"]
    body = str(len(message["body"])).encode()
    fields = [(b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": fields})
    await send({"type": "http.response.body", "body": body})


def guard(**options):
    from llorch.apps.serve.guard import Guard

    return Guard(length, **options)


@pytest.fixture(scope="module")
def port():
    with served(guard(hosts=["Chat.Example", "[fd00::1]"], max_body=1000)) as running:
        yield running.port


@pytest.fixture(scope="module")
def port_with_key():
    with served(guard(key=KEY)) as running:
        yield running.port


def refused(port: int, data: bytes) -> tuple[int, str]:
    """Status and code of an error; code is empty where there is none."""
    status, _, body = ask(port, data)
    return status, error_code(body) if status >= 400 else ""


@pytest.mark.parametrize("name", [*LOOPBACK, "LocalHost", "chat.example", "CHAT.EXAMPLE", "[fd00::1]"])
@pytest.mark.parametrize("with_port", ["", ":", ":8080"])
def test_names_of_the_server_pass_with_any_port(port: int, name: str, with_port: str):
    assert refused(port, request(host=name + with_port)) == (200, "")


@pytest.mark.parametrize(
    "host",
    [
        "", ":", ":11434", "evil.example", "localhost.evil.example", "evil.localhost", "127.0.0.1.evil.example",
        "127.0.0.2", "user@localhost", "localhost:80:80", "localhost:evil", "localhost:8080@evil",
        "[::1", "[::1]x", "::1", "[::2]",
        "[]", "localhost/", "localhost ,evil", "127.1", "2130706433", "0.0.0.0", "\u00ff",
    ],
)  # fmt: skip
def test_other_names_are_refused(port: int, host: str):
    assert refused(port, request(host=host)) == (403, "host_not_allowed")


def test_a_request_without_a_host_is_refused(port: int):
    assert refused(port, b"GET / HTTP/1.0\r\n\r\n") == (403, "host_not_allowed")


def test_the_address_that_was_reached_is_a_name_of_the_server():
    with served(guard(key=KEY), host="0.0.0.0") as running:
        with socket.create_connection(("127.0.0.2", running.port)) as client:
            client.sendall(request(host=f"127.0.0.2:{running.port}", path="/health"))
            assert answer(client)[0] == 200
        assert refused(running.port, request(host="127.0.0.2", path="/health")) == (403, "host_not_allowed")


@pytest.mark.parametrize(
    "origin", ["http://localhost", "https://localhost", "https://chat.example", "HTTP://LOCALHOST"]
)
def test_page_of_the_server_may_ask(port: int, origin: str):
    assert refused(port, request("POST", origin=origin)) == (200, "")


@pytest.mark.parametrize(
    "origin",
    ["null", "", "http://evil.example", "http://localhost:3000", "http://127.0.0.1", "file://", "localhost",
     "http://localhost.evil.example", "http://localhost@evil.example", "chrome-extension://localhost", "http://chat.example.evil"],
)  # fmt: skip
def test_foreign_pages_are_refused(port: int, origin: str):
    assert refused(port, request("POST", origin=origin)) == (403, "origin_not_allowed")


def test_one_foreign_origin_of_two_is_enough(port: int):
    two = b"GET / HTTP/1.1\r\nhost: localhost\r\norigin: http://localhost\r\norigin: http://evil.example\r\n\r\n"
    assert refused(port, two) == (403, "origin_not_allowed")


@pytest.mark.parametrize("origin", ["http://localhost", "http://evil.example"])
def test_a_preflight_is_refused_and_nothing_is_allowed_across_origins(port: int, origin: str):
    status, headers, body = ask(port, request("OPTIONS", origin=origin, access_control_request_method="POST"))
    assert (status, error_code(body)) == (403, "origin_not_allowed")
    assert not [name for name in headers if name.startswith("access-control")]


ALLOWED = ("http://localhost:3000", "app://obsidian.md", "null")


@pytest.fixture(scope="module")
def port_with_origins():
    with served(guard(key=KEY, origins=ALLOWED)) as running:
        yield running.port


def cors(headers: dict[str, str]) -> dict[str, str]:
    return {name.removeprefix("access-control-"): value for name, value in headers.items() if "access-control" in name}


@pytest.mark.parametrize("origin", ALLOWED)
def test_a_page_of_an_allowed_origin_may_ask_and_read(port_with_origins: int, origin: str):
    preflight = request("OPTIONS", "/v1/x", origin=origin, access_control_request_method="POST",
                        access_control_request_headers="authorization, content-type")  # fmt: skip
    status, headers, body = ask(port_with_origins, preflight)
    assert (status, body, headers["vary"], headers["access-control-allow-origin"]) == (204, b"", "origin", origin)
    assert {"authorization", "content-type", "x-request-id"} <= set(cors(headers)["allow-headers"].split(", "))
    assert set(cors(headers)["allow-methods"].split(", ")) == {"get", "post"}
    for key, wanted in ((KEY, 200), ("wrong", 401)):  # a page reads a refusal, too
        asked = request("POST", "/v1/x", b"x", origin=origin, authorization=f"Bearer {key}")
        status, headers, _ = ask(port_with_origins, asked)
        assert (status, headers["access-control-allow-origin"], headers["vary"]) == (wanted, origin, "origin")
        assert "x-request-id" in cors(headers)["expose-headers"]
        assert "allow-credentials" not in cors(headers)


@pytest.mark.parametrize(
    "origin",
    ["http://localhost:3001", "http://localhost:30000", "https://localhost:3000", "http://evil.example", "NULL", "*",
     "http://localhost:3000/", "http://localhost:3000.evil.example", "app://obsidian.md.evil", ""],
)  # fmt: skip
def test_unlisted_origin_is_refused(port_with_origins: int, origin: str):
    for asked in (
        request("OPTIONS", origin=origin, access_control_request_method="POST"),
        request("POST", origin=origin, authorization=f"Bearer {KEY}"),
    ):
        status, headers, body = ask(port_with_origins, asked)
        assert (status, error_code(body), headers["vary"]) == (403, "origin_not_allowed", "origin")
        assert cors(headers) == {}


def test_null_is_no_origin_unless_it_is_named():
    with served(guard(origins=ALLOWED[:2])) as running:
        assert refused(running.port, request("POST", origin="null")) == (403, "origin_not_allowed")


def test_an_allowed_origin_needs_a_host_of_the_server_and_may_be_named_once(port_with_origins: int):
    elsewhere = request("POST", host="evil.example", origin=ALLOWED[0], authorization=f"Bearer {KEY}")
    assert refused(port_with_origins, elsewhere) == (403, "host_not_allowed")
    both = b"".join(f"origin: {origin}\r\n".encode() for origin in (ALLOWED[0], "http://evil.example"))
    head = f"GET / HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {KEY}\r\n".encode()
    assert refused(port_with_origins, head + both + b"\r\n") == (403, "origin_not_allowed")


def test_a_request_without_an_origin_gets_no_such_header(port_with_origins: int):
    status, headers, _ = ask(port_with_origins, request(authorization=f"Bearer {KEY}"))
    assert (status, cors(headers), headers["vary"]) == (200, {}, "origin")


def basic(password: str, name: str = "") -> str:
    return "Basic " + base64.b64encode(f"{name}:{password}".encode()).decode()


@pytest.mark.parametrize(
    "authorization",
    [f"Bearer {KEY}", f"bearer {KEY}", f"Bearer  {KEY}", basic(KEY), basic(KEY, "me"), basic("", KEY), basic("x", KEY)],
)
def test_request_with_the_key_is_accepted(port_with_key: int, authorization: str):
    assert refused(port_with_key, request(authorization=authorization)) == (200, "")


@pytest.mark.parametrize(
    "authorization",
    ["", "Bearer", "Bearer ", f"Bearer {KEY}x", f"Bearer {KEY[:-1]}", f"Bearer {KEY.lower()}", KEY, f"Token {KEY}",
     "Bearer \u00e9\u00ff", "\u00e9", "Basic", "Basic !", "Basic \u00ff", basic("x"), basic("", "x"), "Basic " + KEY,
     basic(KEY[1:], KEY[0]),
     f"Bearer {KEY} {KEY}"],
)  # fmt: skip
def test_request_with_a_wrong_key_is_refused(port_with_key: int, authorization: str):
    assert refused(port_with_key, request(authorization=authorization)) == (401, "invalid_api_key")


def test_request_with_two_keys_is_refused(port_with_key: int):
    line = f"authorization: Bearer {KEY}\r\n"
    twice = f"GET / HTTP/1.1\r\nhost: localhost\r\n{line}{line}\r\n".encode()
    assert refused(port_with_key, twice) == (401, "invalid_api_key")


@pytest.mark.parametrize(
    ("path", "status"),
    [("/health", 200), ("/%68ealth", 200), ("/health?x=1", 200), ("/", 401), ("/health/", 401), ("/health/../v1", 401),
     ("//health", 401), ("/HEALTH", 401), ("/health%00", 401),
     ("/docs", 401), ("/metrics", 401), ("/openapi.json", 401),
     ("http://localhost/health", 401)],
)  # fmt: skip
def test_without_a_key_only_health_answers(port_with_key: int, path: str, status: int):
    assert refused(port_with_key, request(path=path))[0] == status


def test_a_browser_is_asked_for_the_key_and_a_program_for_a_header(port_with_key: int):
    browser = ask(port_with_key, request(accept="text/html,*/*"))[1]
    assert browser["www-authenticate"].startswith("basic")
    assert ask(port_with_key, request(accept="*/*"))[1]["www-authenticate"] == "bearer"


def test_a_key_is_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch):
    import hmac

    compared = []
    monkeypatch.setattr(hmac, "compare_digest", lambda a, b: compared.append((len(a), len(b))) or False)
    with served(guard(key=KEY)) as running:
        for given in ("", "x", KEY, "x" * 1000):
            assert refused(running.port, request(authorization=f"Bearer {given}"))[0] == 401
        for given in (basic(KEY), basic("x", KEY)):  # both are looked at, whichever it is
            assert refused(running.port, request(authorization=given))[0] == 401
    assert compared == [(32, 32)] * (4 + 2 * 2)


def test_a_body_of_the_limit_passes_and_one_byte_more_does_not(port: int):
    assert ask(port, request("POST", "/", b"x" * 1000))[2] == b"1000"
    assert refused(port, request("POST", "/", b"x" * 1001)) == (413, "request_too_large")


def test_a_length_is_refused_before_the_body_comes(port: int):
    with connect(port, request("POST", content_length="1001")) as client:
        assert answer(client)[0] == 413


def chunks(*sizes: int) -> bytes:
    return b"".join(b"%x\r\n%s\r\n" % (n, b"x" * n) for n in sizes)


def test_chunks_are_counted_while_they_come(port: int):
    head = request("POST", transfer_encoding="chunked")
    assert ask(port, head + chunks(500, 500, 0)[:-2] + b"\r\n")[2] == b"1000"
    with connect(port, head + chunks(500)) as client:
        client.sendall(chunks(501))
        assert answer(client)[0] == 413


@pytest.mark.parametrize(
    ("sizes", "status"),
    [
        ((10,), 200),
        ((11,), 413),
        ((4, 6), 200),
        ((4, 7), 413),
        ((5, 5, 1), 413),
        ((1,) * 10, 200),
        ((1,) * 11, 413),
        ((10, 0), 200),
    ],
)
def test_the_sizes_of_all_messages_of_a_body_are_added_up(sizes: tuple[int, ...], status: int):
    left, sent = list(sizes), list[Any]()

    async def receive():
        return {"type": "http.request", "body": b"x" * left.pop(0), "more_body": bool(left)}

    async def send(message):
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/", "headers": [(b"host", b"localhost")]}
    asyncio.run(guard(max_body=10)(scope, receive, send))
    assert sent[0]["status"] == status


def test_a_refused_body_is_read_to_its_end_and_the_connection_goes_on(port: int):
    with connect(port, request("POST", "/", b"x" * 5000)) as client:
        assert answer(client)[0] == 413
        client.sendall(request())
        assert answer(client)[0] == 200


def test_client_that_only_sends_reads_the_refusal_at_the_end(port: int):
    large = 48 * 2**20  # more than lies between the two
    for data in (
        request("POST", "/", b"x" * large, connection="close"),
        request("POST", "/", connection="close", transfer_encoding="chunked") + chunks(large, 0)[:-2] + b"\r\n",
        request("POST", "/", b"x" * large, connection="close", origin="null"),
    ):
        with connect(port, data) as client:
            assert answer(client)[0] in (403, 413)


def test_bodies_together_have_a_bound(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("llorch.apps.serve.guard.MAX_BODIES", 1000)
    guarded = guard(max_body=800)
    with served(guarded) as running:
        with connect(running.port, request("POST", content_length="800") + b"x" * 700) as client:
            until(lambda: guarded._n_body_bytes == 700)
            status, headers, body = ask(running.port, request("POST", "/", b"x" * 400))
            assert (status, error_code(body), headers["retry-after"]) == (503, "too_many_bodies", "1")
            with connect(running.port, request("POST", "/", b"x" * 400)) as again:
                assert answer(again)[0] == 503
                again.sendall(request("POST", "/", b"x" * 300))
                assert answer(again)[2] == b"300"
            client.sendall(b"x" * 100)
            assert answer(client)[2] == b"800"
        with connect(running.port, request("POST", content_length="800") + b"x" * 700):
            until(lambda: guarded._n_body_bytes == 700)
        until(lambda: guarded._n_body_bytes == 0)


def test_the_log_has_a_line_for_each_request_and_no_secret():
    lines: list[str] = []
    with served(guard(key=KEY, max_body=10, log=lines.append)) as running:
        key: dict[str, Any] = {"authorization": f"Bearer {KEY}"}
        ask(running.port, request("POST", "/v1/x?q=prompt", b"secret", **key))
        ask(running.port, request(path="/a%0Ab%1b%5B31m", **key))
        ask(running.port, request(path="/" + "z" * 1000, authorization="Bearer wrong"))
        connect(running.port, request("POST", "/left", content_length="5", **key)).close()
        until(lambda: len(lines) == 4)
    said = "\n".join(line.rpartition(" ")[0].rpartition(" ")[0] for line in lines)
    assert said == "POST /v1/x 200\nGET /a\\nb\\x1b[31m 200\nGET /" + "z" * 99 + " 401\nPOST /left 499"
    assert all(line.endswith(" ms") for line in lines)


@pytest.mark.parametrize("key", ["", "a b", "a\n", "\u00e9", "\x00"])
def test_a_key_that_no_header_can_carry_is_refused_at_the_start(key: str):
    from llorch.apps.serve.guard import require_key

    with socket.create_server(("127.0.0.1", 0)) as bound, refuses(ValueError, "serve", expected=("key", "ASCII")):
        require_key(bound, key)


@pytest.mark.parametrize("host", ["0.0.0.0", "0", "::"])
def test_an_address_for_everybody_needs_a_key(host: str):
    from llorch.apps.serve.guard import require_key
    from llorch.apps.serve.server import bind

    with bind(host, 0) as bound:
        with refuses(ValueError, "serve", bound.getsockname()[0], expected=("key", "--api-key"), got="none"):
            require_key(bound, None)
        require_key(bound, KEY)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.3", "localhost"])
def test_loopback_address_needs_no_key(host: str):
    from llorch.apps.serve.guard import require_key
    from llorch.apps.serve.server import bind

    with bind(host, 0) as bound:
        assert bound.getsockname()[0].startswith(("127.", "::1"))
        require_key(bound, None)
