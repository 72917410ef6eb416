"""Reward server and client: equal scores, joined requests, replicas that die, bodies that attack."""

from __future__ import annotations

import base64
import io
import json
import math
import socket
import struct
import sys
import threading
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import httpx
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from serving import Server, serving

from visual_grpo.errors import UserError
from visual_grpo.reward import RewardError, RewardRequest, as_reward
from visual_grpo.scoring import RewardSuite
from visual_grpo.types import RewardStatus

OK, NOT_APPLICABLE, FAILED = (int(state) for state in RewardStatus)
NAMES = "serving:named,serving:picky,serving:wrong_length,serving:Grouped,serving:slow,brightness,jpeg_incompressibility,overlong"
ARGS = (NAMES, "overlong.params.max_length=20", "overlong.params.cache=10", "--batch", "32")


@pytest.fixture(scope="module")
def server():
    with serving(*ARGS) as found:
        yield found


def rows(count: int, first: int = 0, **columns) -> RewardRequest:
    return RewardRequest.build(
        [f"prompt {i}" for i in range(count)],
        texts=["é" * (i % 7) for i in range(first, first + count)],
        metadata=[{"id": first + i, **{k: v[i] for k, v in columns.items()}} for i in range(count)],
    )


def score(server, name, request, **params):
    reward = as_reward("remote", params={"url": f"{server.url}/{name}", "timeout_s": 60, **params})
    try:
        return reward(request)
    finally:
        reward.close()


def raw(server, body, path="/score", **headers):
    return httpx.post(f"{server.url}{path}", content=body, headers=headers, trust_env=False, timeout=60)


def message(count=1, **over):
    texts = {"prompts": ["p"] * count, "texts": ["t"] * count, "metadata": [{"id": i} for i in range(count)]}
    return {"id": "a", "reward": "serving:named", **texts, "group_ids": list(range(count)), **over}


class TestScores:
    def test_values_states_and_details_are_those_of_the_reward_itself(self, server):
        request = RewardRequest.build(
            ["a", "b", "c"],
            images=torch.rand(3, 3, 24, 16, generator=torch.Generator().manual_seed(0)),
            texts=["x", "yy", ""],
            lengths=torch.tensor([8, 15, 25]),
        )
        for name, params, options in [
            ("jpeg_incompressibility", {}, {}),
            ("brightness", {}, {"encoding": "raw"}),
            ("overlong", {"max_length": 20, "cache": 10}, {"rows_per_request": 1}),
        ]:
            mine, theirs = as_reward(name, params=params)(request), score(server, name, request, **options)
            torch.testing.assert_close(theirs.values, mine.values, rtol=0, atol=0)
            for key, figure in (mine.details or {}).items():
                torch.testing.assert_close(theirs.details[key], figure.float(), rtol=0, atol=0)
        eight_bits = score(server, "brightness", request).values
        torch.testing.assert_close(eight_bits, as_reward("brightness")(request).values, rtol=0, atol=1 / 510)

    def test_not_applicable_and_failed_rows_keep_their_state(self, server):
        output = score(server, "serving:named", rows(12))
        assert output.status.tolist() == [OK] * 9 + [NOT_APPLICABLE] + [OK] * 2
        suite = RewardSuite({"picky": {"reward": "serving:picky", "url": server.url}})
        columns = {"nan": [i == 1 for i in range(6)], "raise": [i == 4 for i in range(6)]}
        batch = suite.score(rows(6, **columns))
        assert batch.status[:, 0].tolist() == [OK, FAILED, OK, OK, FAILED, OK]
        assert any("nobody can score" in failure.error for failure in suite.failures)
        suite.close()

    def test_a_row_with_broken_pixels_is_not_sent(self, server):
        images = torch.full((2, 3, 8, 8), 0.5)
        images[1, 0, 0, 0] = math.nan
        output = score(server, "jpeg_incompressibility", RewardRequest.build(["a", "b"], images=images))
        assert output.status.tolist() == [OK, FAILED]

    def test_a_url_is_a_reward(self, server):
        request = rows(3)
        for config in (
            {f"{server.url}/serving:named": 1.0},
            {"serving:named": {"url": server.url}},
            {"remote": {"url": [f"{server.url}/serving:named"]}},
            {"mine": {"reward": "remote", "params": {"url": server.url, "reward": "serving:named"}}},
        ):
            with RewardSuite(config) as suite:
                assert suite.score(request).values[:, 0].tolist() == pytest.approx([0, 1.001, 2.002])

    def test_group_rewards_get_whole_groups(self, server):
        def part(seed):
            draws = torch.rand(12, generator=torch.Generator().manual_seed(seed))
            columns = [{"score": float(s)} for s in draws]
            return RewardRequest.build(
                ["p"] * 12, metadata=columns, group_ids=torch.tensor([5, 5, 9, 9, 9, 5] * 2)
            ), draws

        def one(seed):
            request, draws = part(seed)
            with RewardSuite(
                {"g": {"reward": "serving:Grouped", "url": server.url, "params": {"whole_groups": True}}}
            ) as suite:
                values = suite.score(request).values[:, 0]
            for group in (5, 9):
                mine = request.group_ids == group
                assert torch.equal(values[mine], draws[mine].argsort().argsort().float())

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(one, range(4)))

    def test_the_command_line_scores_with_a_url(self, server, tmp_path, capsys):
        from visual_grpo.cli import main

        (tmp_path / "prompts.txt").write_text("a\nb\n")
        (tmp_path / "texts.jsonl").write_text('{"text": "x"}\n{"text": "yy"}\n')
        files = ["--texts", str(tmp_path / "texts.jsonl"), "--prompts", str(tmp_path / "prompts.txt"), "--json"]
        assert main(["score", "--reward", f"{server.url}/serving:wrong_length", *files]) == 0
        assert json.loads(capsys.readouterr().out)["rewards"][0]["mean"] == 1.0


class TestUnderLoad:
    def test_64_clients_2000_requests_and_a_replica_that_dies(self, server):
        """No score wrong, lost or duplicated."""
        clients, each, sizes = 64, 2000 // 64 + 1, (1, 2, 3)
        dying = Server(*ARGS)
        done, got, lock = threading.Event(), {}, threading.Lock()
        answered, of_the_dying = 0, 0.0

        def client(number):
            nonlocal answered
            reward = as_reward(
                "remote",
                params={"url": [dying.url, server.url], "reward": "serving:named", "connections": 1, "timeout_s": 120},
            )
            for turn in range(each):
                first = 3 * (number * each + turn)
                request = rows(sizes[turn % 3], first)
                output = reward(request)
                with lock:
                    answered += 1
                    for row, value, state in zip(
                        request.metadata, output.values.tolist(), output.status.tolist(), strict=True
                    ):
                        got.setdefault(row["id"], []).append((value, state))
            reward.close()

        def killer():
            nonlocal of_the_dying
            while answered < 700 and not done.is_set():
                time.sleep(0.02)
            of_the_dying = metrics(dying)['visual_grpo_reward_requests_total{reward="serving:named"}']
            dying.kill()

        try:
            thread = threading.Thread(target=killer)
            thread.start()
            with ThreadPoolExecutor(clients) as pool:
                list(pool.map(client, range(clients)))
        finally:
            done.set()
            thread.join()
        assert answered == clients * each >= 2000
        assert of_the_dying > 100
        assert len(got) == sum(sizes[turn % 3] for turn in range(each)) * clients
        for id, scores in got.items():
            assert len(scores) == 1
            value, state = scores[0]
            assert state == (NOT_APPLICABLE if id % 10 == 9 else OK)
            if state == OK:
                assert value == torch.tensor(id + (id % 7) / 1000).item()
        counted = metrics(server)
        assert (
            counted['visual_grpo_reward_batches_total{reward="serving:named"}']
            < counted['visual_grpo_reward_requests_total{reward="serving:named"}']
        )  # requests were joined
        assert server.alive()

    def test_a_bad_request_does_not_harm_those_joined_with_it(self, server):
        def one(number):
            request = rows(2, long=[number == 5] * 2)
            if number == 5:
                with pytest.raises(RewardError, match="returned 3 values for 2 rows"):
                    score(server, "serving:wrong_length", request)
            else:
                assert score(server, "serving:wrong_length", request).values.tolist() == [1.0, 1.0]

        with ThreadPoolExecutor(10) as pool:
            list(pool.map(one, range(10)))


def metrics(server):
    text = httpx.get(f"{server.url}/metrics", trust_env=False).text
    return {k: float(v) for k, v in (line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))}


def png(width, height, body=None):
    """A PNG of any claimed size, its pixels zeros."""

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    data = zlib.compress(bytes((1 + 3 * width) * height)) if body is None else body
    made = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", data) + chunk(b"IEND", b"")
    return base64.b64encode(made).decode()


def image_message(*images):
    return message(len(images), reward="brightness", images={"encoding": "png", "data": list(images)})


REFUSED = {
    "malformed JSON": (b'{"id": ', 400, "JSON"),
    "no JSON": (b"\x80\x04\x95pickle", 400, "JSON|utf|UTF|expected"),
    "deep JSON": (b"[" * 10**6, 400, ""),
    "deep metadata": (json.dumps(message()).replace('{"id": 0}', '{"a":' * 9999 + "1" + "}" * 9999).encode(), 400, ""),
    "an unknown field": (message(pickle="gASVAA=="), 400, "pickle: "),
    "a list": ([], 400, "object|valid"),
    "a wrong type": (message(prompts="p"), 400, "prompts: "),
    "a wrong length": (message(texts=["a", "b"]), 400, "1 prompts needs 1 rows"),
    "no rows": (message(0), 400, "at least one row"),
    "too many rows": (message(2000), 400, "2000 rows are more"),
    "a huge group id": (message(group_ids=[2**70]), 400, ""),
    "an unknown reward": (message(reward="pickscor"), 404, "no reward 'pickscor'; it has serving:named"),
    "no reward named": (message(reward=None), 422, "several rewards"),
    "no images": (message(reward="brightness"), 422, "reads images"),
    "cut groups": (message(reward="serving:Grouped"), 422, "whole_groups: true"),
    "a bomb of pixels": (image_message(png(60_000, 60_000, zlib.compress(bytes(10**6)))), 400, "pixel"),
    "a bomb in parts": (image_message(*[png(4000, 4000, b"")] * 9), 400, "above the server's limit"),
    "a bomb of text": (image_message("A" * 1001), 400, "base64|no PNG"),
    "a GIF": (image_message(base64.b64encode(b"GIF89a" + bytes(40)).decode()), 400, "no PNG"),
    "a cut PNG": (image_message(png(16, 16)[:60]), 400, "no PNG|damaged"),
    "unequal sizes": (image_message(png(8, 8), png(9, 9)), 400, "need one size"),
    "a raw bomb": (
        message(reward="brightness", images={"encoding": "raw", "dtype": "float32", "shape": [1, 3, 10**6, 10**6], "data": ""}),
        400,
        "pixels",
    ),
    "a raw array of another size": (
        message(reward="brightness", images={"encoding": "raw", "dtype": "float32", "shape": [1, 3, 2, 2], "data": "AAAA"}),
        400,
        "does not have 3 bytes",
    ),
    "a pickled array": (
        message(reward="brightness", images={"encoding": "raw", "dtype": "object", "shape": [1], "data": "AAAA"}), 400, "dtype"
    ),
}  # fmt: skip


class TestAttacks:
    @pytest.mark.parametrize("name", REFUSED)
    def test_refused_and_alive(self, server, name):
        body, status, told = REFUSED[name]
        response = raw(server, body if isinstance(body, bytes) else json.dumps(body))
        assert response.status_code == status, response.text[:300]
        assert set(response.json()) == {"error"}
        import re

        assert re.search(told, response.json()["error"])
        assert server.alive()

    @pytest.mark.parametrize("chunked", [False, True])
    def test_a_body_of_a_gigabyte(self, server, chunked):
        """Refused before it is in memory: by its length, or when the limit is passed."""
        head = "transfer-encoding: chunked" if chunked else f"content-length: {2**30}"
        part = b"x" * (1 << 20)
        sent = 0
        with socket.create_connection(("127.0.0.1", server.port), 60) as client:
            client.sendall(f"POST /score HTTP/1.1\r\nhost: x\r\n{head}\r\n\r\n".encode())
            try:
                while sent < 2**30:
                    client.sendall(b"%x\r\n%b\r\n" % (len(part), part) if chunked else part)
                    sent += len(part)
            except (BrokenPipeError, ConnectionResetError):
                pass
            if not chunked:
                with suppress(
                    ConnectionResetError
                ):  # what is on its way when the server closes may take the answer along
                    assert b" 413 " in client.recv(100)
        assert sent < 2**28
        assert server.alive()
        assert memory_mb(server) < 1500

    def test_a_compressed_body(self, server):
        bomb = zlib.compress(b"0" * 10**7)
        response = raw(server, bomb, **{"content-encoding": "deflate"})
        assert response.status_code == 415
        assert server.alive()

    def test_tokens(self, tmp_path, monkeypatch):
        with serving("brightness", token="s3cret") as server:
            images = {"images": torch.full((1, 3, 4, 4), 1.0)}
            request = RewardRequest.build(["a"], **images)
            for wrong in (None, "wrong", "é"):
                monkeypatch.setenv("VISUAL_GRPO_REWARD_TOKEN", wrong) if wrong else monkeypatch.delenv(
                    "VISUAL_GRPO_REWARD_TOKEN", raising=False
                )
                if wrong == "é":
                    header = {"authorization": "Bearer é".encode()}
                    assert (
                        httpx.post(f"{server.url}/score", headers=header, content=b"{}", trust_env=False).status_code
                        == 401
                    )
                    continue
                with pytest.raises(RewardError, match=r"status 401.*token is missing or wrong"):
                    score(server, "brightness", request)
            assert httpx.get(f"{server.url}/metrics", trust_env=False).status_code == 401
            monkeypatch.setenv("VISUAL_GRPO_REWARD_TOKEN", "s3cret")
            assert score(server, "brightness", request).values.tolist() == [1.0]
            assert server.alive()


def memory_mb(server):
    status = Path(f"/proc/{server.process.pid}/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) / 1024


class TestFailures:
    def test_servers_that_are_gone(self):
        ports = [free_port(), free_port()]
        urls = [f"http://127.0.0.1:{port}" for port in ports]
        suite = RewardSuite({"brightness": {"url": urls, "timeout_s": 4}})
        with pytest.raises(
            RewardError, match=rf"gone: no answer within 3\.6 s \(.*{ports[0]}: ConnectError.*{ports[1]}"
        ):
            suite.score(RewardRequest.build(["a"] * 40, images=torch.zeros(40, 3, 4, 4)))
        suite.close()

    def test_a_server_that_hangs_costs_one_attempt(self, server):
        with socket.create_server(("127.0.0.1", 0)) as deaf:
            urls = [f"http://127.0.0.1:{deaf.getsockname()[1]}", server.url]
            params = {"url": urls, "reward": "serving:named", "timeout_s": 60, "attempt_s": 0.5}
            reward = as_reward("remote", params=params)
            for first in (0, 3):
                assert reward(rows(3, first)).status.tolist() == [OK] * 3
            reward.close()

    def test_a_server_that_comes_back(self):
        port = free_port()
        reward = as_reward("remote", params={"url": f"http://127.0.0.1:{port}/brightness", "timeout_s": 100})
        request = RewardRequest.build(["a"], images=torch.ones(1, 3, 4, 4))
        with ThreadPoolExecutor(1) as pool:
            early = pool.submit(reward, request)
            time.sleep(0.5)
            with serving("brightness", "--port", str(port)):
                assert early.result(90).values.tolist() == [1.0]
        reward.close()

    def test_requests_without_an_answer_are_failed_rows(self, server):
        """Two requests of a call are answered by a server that dies after the first."""
        import http.server

        class Half(http.server.BaseHTTPRequestHandler):
            seen = 0

            def do_POST(self):
                body = self.rfile.read(int(self.headers["content-length"]))
                type(self).seen += 1
                if b'"id": 0,' not in body and b'"id": 0}' not in body:
                    self.send_error(500, "no")
                    return
                got = raw(server, body)
                self.send_response(200)
                self.send_header("content-length", str(len(got.content)))
                self.end_headers()
                self.wfile.write(got.content)

            def log_message(self, *_):
                pass

        with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Half) as half:
            threading.Thread(target=half.serve_forever, daemon=True).start()
            url = f"http://127.0.0.1:{half.server_address[1]}/serving:named"
            reward = as_reward("remote", params={"url": url, "rows_per_request": 2, "timeout_s": 3, "connections": 2})
            assert reward(rows(4)).status.tolist() == [OK, OK, FAILED, FAILED]
            reward.close()
            half.shutdown()

    @pytest.mark.parametrize(
        "answer",
        [
            {"id": "other", "reward": "serving:named", "values": [1.0], "status": ["ok"]},
            {"values": [1.0, 2.0], "status": ["ok", "ok"]},
            {"values": [None], "status": ["ok"]},
            {"values": [1.0], "status": ["fine"]},
            {"reward": "brightness", "values": [1.0], "status": ["ok"]},
            [],
        ],
    )
    def test_an_answer_that_is_not_ours_is_not_believed(self, answer):
        import http.server

        class Liar(http.server.BaseHTTPRequestHandler):
            def do_POST(self):
                given = json.loads(self.rfile.read(int(self.headers["content-length"])))
                full = {"id": given["id"], "reward": given["reward"], **answer} if isinstance(answer, dict) else answer
                data = json.dumps(full).encode()
                self.send_response(200)
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_):
                pass

        with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Liar) as liar:
            threading.Thread(target=liar.serve_forever, daemon=True).start()
            url = f"http://127.0.0.1:{liar.server_address[1]}/serving:named"
            reward = as_reward("remote", params={"url": url, "attempts": 1, "timeout_s": 20})
            with pytest.raises(RewardError, match="gone: no answer"):
                reward(rows(1))
            reward.close()
            liar.shutdown()

    @pytest.mark.parametrize(
        "url", ["http://", "ftp://a/b", "http://a:b", "http://a?x=1", [], 3, ["http://a/x", "http://b/y"]]
    )
    def test_wrong_addresses(self, url):
        with pytest.raises(UserError, match=r"remote|address"):
            as_reward("remote", params={"url": url})

    def test_metadata_that_is_no_json(self, server):
        request = RewardRequest.build(["a"], texts=["x"], metadata=[{"id": 1, "image": io.BytesIO()}])
        with pytest.raises(UserError, match=r"params\.columns"):
            score(server, "serving:named", request)
        assert score(server, "serving:named", request, columns=["id"]).values.tolist() == pytest.approx([1.001])


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def test_the_server_needs_no_model_library():
    """It runs in an environment of a reward's own, where ours are absent or have other versions."""
    blocked = (
        "transformers",
        "diffusers",
        "accelerate",
        "peft",
        "datasets",
        "timm",
        "open_clip",
        "scipy",
        "matplotlib",
    )
    code = f"""
import sys, threading, urllib.request
for name in {blocked!r}: sys.modules[name] = None
sys.path.insert(0, {str(Path(__file__).parent)!r})
from visual_grpo.cli import main
import visual_grpo.reward_server as server
plain = server.serve
def serve(service, announce, **options):
    def told(url):
        def ask():
            print(urllib.request.urlopen(url + "/health").read().decode())
            import _thread; _thread.interrupt_main()
        threading.Thread(target=ask, daemon=True).start()
    plain(service, announce=told, **options)
server.serve = serve
main(["serve-rewards", "serving:named,code", "--port", "0"])
"""
    import subprocess

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert '"name": "serving:named"' in done.stdout, done.stderr


def test_serving_on_a_port_that_is_taken(capsys):
    from visual_grpo.cli import main

    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert main(["serve-rewards", "brightness", "--port", str(taken.getsockname()[1])]) == 2
    assert "choose another --port" in capsys.readouterr().err
