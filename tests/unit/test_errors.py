"""Texts of messages: untrusted characters never reach a terminal."""

from rlctl.errors import visible


def test_every_kind_of_hidden_character_is_escaped():
    assert visible("a\tb\nc") == "a\tb\nc"
    assert visible("a\tb\nc", keep="") == "a\\tb\\nc"
    hidden = "\x7f\x85\u200b\u2028\ufeff\ue000\ud800\U000e0001"
    assert visible(hidden) == "\\x7f\\x85\\u200b\\u2028\\ufeff\\ue000\\ud800\\U000e0001"
    assert visible("naïve 漢字\u00a0x") == "naïve 漢字\u00a0x"
