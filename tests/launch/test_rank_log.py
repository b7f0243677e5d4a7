import os
import threading

from shardclip.launch.rank_log import RankLog, log_name


def pump(tmp_path, chunks, prefix="h:0 "):
    """Send chunks through a log; returns what the screen and the file got, write by write."""
    source, end = os.pipe()
    shown, screen = os.pipe()
    log = RankLog(tmp_path / "rank.log", tmp_path / "lock", prefix)
    with os.fdopen(source, "rb") as stream:
        thread = threading.Thread(target=log.pump, args=(stream, screen, True))
        thread.start()
        for chunk in chunks:
            os.write(end, chunk)
        os.close(end)
        thread.join()
    log.close()
    os.close(screen)
    with os.fdopen(shown, "rb") as out:
        return out.read(), (tmp_path / "rank.log").read_bytes(), list(log.errors)


def test_lines_are_whole_and_prefixed(tmp_path):
    screen, file, errors = pump(tmp_path, [b"one\ntw", b"o\nthr", b"ee"])
    assert screen == b"h:0 one\nh:0 two\nh:0 three\n"
    assert file == b"one\ntwo\nthree\n"
    assert errors == ["one", "two", "three"]


def test_a_progress_bar_is_shown_as_it_moves(tmp_path):
    screen, _, _ = pump(tmp_path, [b"\r10%", b"\r20%", b"\r\n"], "")
    assert screen == b"\r10%\r20%\r\n"


def test_without_a_prefix_nothing_is_shown(tmp_path):
    screen, file, _ = pump(tmp_path, [b"one\n"], None)
    assert (screen, file) == (b"", b"one\n")


def test_ranks_on_one_screen_do_not_tear_lines(tmp_path):
    """Lines longer than a pipe takes at once, from several ranks together."""
    shown, screen = os.pipe()
    got = []
    reader = threading.Thread(target=lambda: got.append(_read_all(shown)))
    reader.start()
    pumps = []
    for rank in range(3):
        source, end = os.pipe()
        log = RankLog(tmp_path / f"{rank}.log", tmp_path / "lock", f"{rank} ")
        stream = os.fdopen(source, "rb")
        copy = threading.Thread(target=log.pump, args=(stream, screen, False))
        pumps.append((copy, (stream, log)))
        text = b"".join(bytes([97 + rank]) * 20_000 + b"\n" for _ in range(20))
        writer = threading.Thread(target=_write_all, args=(end, text))
        pumps.append((writer, ()))
    for thread, _ in pumps:
        thread.start()
    for thread, opened in pumps:
        thread.join()
        for file in opened:
            file.close()
    os.close(screen)
    reader.join()
    lines = got[0].decode().splitlines()
    assert len(lines) == 60
    for line in lines:
        assert line[2:] == chr(97 + int(line[0])) * 20_000


def _read_all(descriptor):
    with os.fdopen(descriptor, "rb") as stream:
        return stream.read()


def _write_all(descriptor, data):
    with os.fdopen(descriptor, "wb") as stream:
        stream.write(data)


def test_logs_are_named_by_host_rank_and_restart():
    assert log_name("n1", 3, "2") == "n1-rank3-restart2.log"
