"""The settings of the elastic rendezvous: where they come from, what is refused, what nodes must share, what is printed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rallypoint.errors import UsageError
from rallypoint.rendezvous.settings import (
    BY_KEY,
    CONVERTERS,
    SETTINGS,
    Setting,
    Settings,
    agreed,
    check_node_unit,
    describe,
    markdown,
    mismatch,
    parse_setting,
    read_settings,
    shown,
)

EXAMPLES = {
    "seconds": "2.5", "seconds_or_0": "2.5", "count": "7", "rank": "3", "truth": "true", "path": "/a/b", "codes": "2+64",
    "limit": "5", "store": "tcp", "number": "1", "worker_store": "rank0", "ports": "29600-29700", "size": "500M",
    "visitors": "any",
}  # fmt: skip
USED = [setting for setting in SETTINGS if setting.used]
each = pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.key)
each_used = pytest.mark.parametrize("setting", USED, ids=lambda setting: setting.key)


@pytest.fixture
def conf(tmp_path: Path) -> Any:
    def write(text: str) -> str:
        (tmp_path / "settings").write_text(text)
        return str(tmp_path / "settings")

    return write


def refusal(config: dict[str, Any], environ: dict[str, str] | None = None) -> str:
    with pytest.raises(UsageError) as caught:
        read_settings(config, environ or {})
    assert "\n" not in str(caught.value)
    return str(caught.value)


# --- the table ---------------------------------------------------------------------------------------------------------------


def test_the_table_and_the_fields_are_one() -> None:
    names = [setting.field for setting in USED]
    assert sorted(names) == sorted(name for name in Settings._fields if name != "sources")
    assert [setting.default for setting in USED] == [getattr(Settings(), name) for name in names]
    assert len(BY_KEY) == len(SETTINGS)


def test_the_defaults_that_users_rely_on() -> None:
    read = read_settings({"timeout": 900}, {})
    assert (read.join_timeout_s, read.last_call_timeout_s, read.close_timeout_s, read.lease_s) == (600, 30, 30, 3)
    assert read == Settings(sources=(("timeout", "--rdzv-conf"),))


def test_the_page_has_the_table_as_it_is() -> None:
    """P24: to renew it, put what `markdown()` gives into the page."""
    assert f"\n{markdown()}\n" in (Path(__file__).parents[2] / "docs" / "rendezvous.md").read_text()


@each
def test_every_setting_has_its_row_in_the_documentation(setting: Setting) -> None:
    """P24"""
    row = next(line for line in markdown().splitlines() if line.startswith(f"| `{setting.key}` |"))
    assert setting.help in row
    assert setting.variable in row
    assert setting.flag in row


# --- where a value comes from ------------------------------------------------------------------------------------------------


@each_used
def test_each_is_set_by_config_by_variable_and_by_file(setting: Setting, conf: Any) -> None:
    """P24: each settable by flag, environment or file, and its source is remembered."""
    text = EXAMPLES[setting.kind]
    path = conf(f"# about us\n\n{setting.key} = {text}  # because\n")
    expected = CONVERTERS[setting.kind][0](text)
    by_variable = [({}, {setting.variable: text}, setting.variable)] if setting.has_variable else []
    ways: list[tuple[dict[str, Any], dict[str, str], str]] = [
        ({setting.key: text}, {}, "--rdzv-conf"),
        *by_variable,
        ({}, {"RALLYPOINT_CONF": path}, f"{path}:3"),
        ({"conf_file": path}, {}, f"{path}:3"),
    ]
    for config, environ, source in ways:
        read = read_settings(config, environ)
        assert getattr(read, setting.field) == expected
        assert read.source(setting.key).endswith(source)
        assert f"{setting.key} {shown(setting.kind, expected)} (" in describe(read)


def test_what_the_variable_of_the_secret_holds_is_the_secret() -> None:
    """And not the place of it, so that this one setting has no variable."""
    assert [setting.key for setting in USED if not setting.has_variable] == ["secret"]
    assert read_settings({}, {"RALLYPOINT_SECRET": "correct horse battery staple"}) == Settings()


def test_the_nearest_wins(conf: Any) -> None:
    path = conf("join_timeout = 1\nlast_call_timeout = 1\nclose_timeout = 1")
    environ = {"RALLYPOINT_CONF": path, "RALLYPOINT_JOIN_TIMEOUT": "2", "RALLYPOINT_LAST_CALL_TIMEOUT": "2"}
    read = read_settings({"join_timeout": 3}, environ)
    assert (read.join_timeout_s, read.last_call_timeout_s, read.close_timeout_s) == (3, 2, 1)
    other = read_settings({"conf_file": conf("join_timeout=5")}, {"RALLYPOINT_CONF": "/no/such/file"})
    assert other.join_timeout_s == 5


def test_what_is_empty_or_none_says_nothing() -> None:
    assert read_settings({"join_timeout": None}, {"RALLYPOINT_JOIN_TIMEOUT": "7"}).join_timeout_s == 7
    assert read_settings({}, {"RALLYPOINT_JOIN_TIMEOUT": "", "RALLYPOINT_CONF": "", "RALLYPOINT_ELSE": "x"}) == Settings()


def test_a_program_gives_values_of_their_own_types(tmp_path: Path) -> None:
    read = read_settings({"join_timeout": 5, "is_host": False, "no_retry_exit_codes": [64, 2, 2], "secret_file": tmp_path}, {})
    assert (read.join_timeout_s, read.is_host, read.no_retry_exit_codes) == (5.0, False, (2, 64))
    assert read.secret_file == str(tmp_path)


@pytest.mark.parametrize("nothing", ["-1", "none", -1, None])
def test_no_rank_and_no_limit(nothing: Any) -> None:
    read = read_settings({"node_rank": nothing, "max_membership_changes": nothing}, {})
    assert (read.node_rank, read.max_membership_changes) == (None, None)


# --- what is refused ---------------------------------------------------------------------------------------------------------


def test_settings_of_another_back_end_have_no_effect() -> None:
    """One command may be used with several of them."""
    read = read_settings({"protocol": "https", "etcd_prefix": "/x", "rank": 1, "join_timeout": 5}, {})
    assert (read.join_timeout_s, [key for key, _ in read.sources]) == (5, ["join_timeout"])


def test_an_unknown_key_is_refused_with_the_closest(conf: Any) -> None:
    """P24"""
    assert refusal({"join_timout": "5"}).endswith("there is no rendezvous setting 'join_timout'; did you mean join_timeout?")
    assert "the settings are join_timeout, " in refusal({"zzz": "5"})
    path = conf("join_timeout = 5\nnode_units = 5")
    assert f"{path}:2: there is no rendezvous setting 'node_units'; did you mean node_unit?" in refusal({"conf_file": path})
    assert "conf_file" in refusal({"conf_file": conf("conf_file = x")})


BAD = {
    "seconds": ["0", "-1", "nan", "inf", "soon", "1e9", True, [], "1_0s"], "seconds_or_0": ["-1", "nan", "inf", "", "1e9"],
    "count": ["0", "-1", "1.5", 1.5, "many", True, "9999999999"], "rank": ["-2", "1.5", "x", True], "limit": ["-2", "x"],
    "truth": ["maybe", 2, 1.5], "path": ["", "a\nb", 7, "x" * 5000], "codes": ["0", "256", "2;64", "-65", 2, [1.5], "x"],
    "store": ["folder", "file", 1], "number": ["x", []],
    "visitors": ["", "all", 1],
    "worker_store": ["", "host", 1], "ports": [-1, 65536, "5-4", "0-5", "1-2-3", "a"], "size": [0, "0G", -1, "1T", True, "large"],
}  # fmt: skip


@each
def test_a_bad_value_is_told_with_key_value_and_source(setting: Setting, conf: Any) -> None:
    for value in BAD[setting.kind]:
        told = refusal({setting.key: value})
        assert f"--rdzv-conf: {setting.key} must be " in told
        assert told.endswith(f"not {value!r}")
    text = str(BAD[setting.kind][-1])
    if setting.has_variable:
        assert refusal({}, {setting.variable: text}).startswith(f"{setting.variable}: {setting.key} must be ")
    path = conf(f"{setting.key} = {text}")
    assert refusal({"conf_file": path}).startswith(f"{path}:1: {setting.key} must be ")


def test_a_shared_folder_is_refused_with_the_reason() -> None:
    assert "a dead node would never be noticed" in refusal({"store_type": "file"})


def test_a_lease_that_healthy_nodes_could_not_keep() -> None:
    told = refusal({"keep_alive_interval": "0.1"}, {"RALLYPOINT_KEEP_ALIVE_MAX_ATTEMPT": "5"})
    assert "keep_alive_interval (0.1 s, --rdzv-conf) times keep_alive_max_attempt (5, RALLYPOINT_KEEP_ALIVE_MAX_ATTEMPT)" in told
    assert read_settings({"keep_alive_interval": "0.5", "keep_alive_max_attempt": "2"}, {}).lease_s == 1


def test_the_longest_pause_is_not_the_shortest() -> None:
    assert read_settings({"restart_backoff": 60}, {}).restart_backoff_max_s == 60
    assert "longer than restart_backoff_max, 5 s" in refusal({"restart_backoff": 60, "restart_backoff_max": 5})


@pytest.mark.parametrize(
    ("text", "told"),
    [("join_timeout", ":1: 'join_timeout' is not of the form"), ("\n= 5", ":2:"), ("join_timeout =", ":1:"),
     ("node_unit=1\nnode_unit=1", ":2: node_unit stands in "), ("#" * 70_000, "at most 65536 bytes")],
)  # fmt: skip
def test_a_file_that_is_none_of_settings(text: str, told: str, conf: Any) -> None:
    assert told in refusal({"conf_file": conf(text)})


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    assert "cannot be read: No such file" in refusal({"conf_file": str(tmp_path / "none")})
    assert "cannot be read: Is a directory" in refusal({}, {"RALLYPOINT_CONF": str(tmp_path)})
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    assert "is not UTF-8" in refusal({"conf_file": tmp_path / "binary"})


def test_a_sharp_sign_inside_a_value_belongs_to_it(conf: Any) -> None:
    assert read_settings({"conf_file": conf("secret_file = /a#b # but not this")}, {}).secret_file == "/a#b"


@given(st.sampled_from(SETTINGS), st.one_of(st.text(), st.integers(), st.floats(), st.booleans(), st.binary(), st.none()))
def test_any_value_is_taken_or_refused_in_one_line(setting: Setting, value: object) -> None:
    try:
        parsed = parse_setting(setting.key, value, "here")
    except UsageError as error:
        told = str(error)
    else:
        told = f"here: {setting.key} must be {parse_setting(setting.key, parsed, 'here')!r}"
        assert told.endswith(repr(parsed))
    assert told.startswith(f"here: {setting.key} must be ")
    assert "\n" not in told


# --- what nodes must share ---------------------------------------------------------------------------------------------------


def agreement(
    node: str = "alpha", nodes: tuple[int, int] = (1, 2), role: str = "", entry: str = "train.py", **changes: Any
) -> Any:
    settings = Settings().replace(**changes)
    return json.loads(json.dumps(agreed(settings, *nodes, 3, role, entry, 3.0, node)))


def test_nodes_that_were_told_the_same_agree() -> None:
    assert mismatch(agreement("alpha"), agreement("beta")) is None
    assert mismatch(agreement(join_timeout_s=5, node_rank=3, is_host=True, secret_file="/x"), agreement()) is None
    assert mismatch(agreement(role="reader", entry="read.py"), agreement()) is None


def test_a_mismatch_names_each_setting_with_both_values() -> None:
    """P19"""
    told = mismatch(agreement("alpha", nodes=(2, 4), node_unit=2), agreement("beta"))
    assert told == (
        "nnodes is 2:4 here and 1:2 for the job, node_unit is 2 here and 1 for the job, which node beta started:"
        " all nodes of a job need the same settings"
    )


@pytest.mark.parametrize(("changes", "told"), [
    ({"keep_alive_interval_s": 2.0}, "lease is 6 here and 3 for"),
    ({"last_call_timeout_s": 1.0}, "last_call_timeout is 1 here and 30"),
    ({"scale_up_window_s": 1.0}, "scale_up_window is 1 here and 0.3"),
    ({"restart_backoff_s": 2.0}, "restart_backoff is 2 here and 1"),
    ({"restart_backoff_max_s": 5.0}, "restart_backoff_max is 5 here and 30"),
    ({"restart_window_s": 9.0}, "restart_window is 9 here and 0"),
    ({"no_retry_exit_codes": (2, 64)}, "no_retry_exit_codes is 2+64 here and none for"),
    ({"max_membership_changes": 4}, "max_membership_changes is 4 here and none"),
    ({"entry": "other.py"}, "entry_point is other.py here and train.py"),
])  # fmt: skip
def test_every_shared_setting_counts(changes: dict[str, Any], told: str) -> None:
    """P19"""
    assert told in str(mismatch(agreement(**changes), agreement()))


def test_what_is_no_affair_of_the_rendezvous_can_be_shared_too() -> None:
    ours, theirs = (agreed(Settings(), 1, 2, 3, "", "train.py", 3.0, alike=[("copies", count)]) for count in (0, 1))
    assert mismatch(ours, ours) is None
    assert str(mismatch(ours, theirs)).startswith("copies is 0 here and 1 for the job")


def test_another_version_is_told() -> None:
    theirs = {**agreement(), "protocol": 2, "colour": "green"}
    assert "protocol is 1 here and 2 for the job, colour is none here and green for the job" in str(mismatch(agreement(), theirs))


@given(st.dictionaries(st.text(), st.one_of(st.text(), st.integers(), st.floats(), st.none(), st.lists(st.text())), max_size=30))
def test_whatever_the_store_holds_is_told_in_one_short_line(theirs: dict[str, Any]) -> None:
    told = mismatch(agreement(), theirs)
    assert told is not None
    assert told.isprintable()
    assert len(told) < 6000


@pytest.mark.parametrize(("unit", "nodes", "fits"), [
    (1, (1, 1), True), (2, (1, 4), True), (4, (1, 4), True), (5, (1, 4), False), (4, (5, 7), False), (4, (5, 8), True),
    (3, (3, 3), True), (2, (3, 3), False),
])  # fmt: skip
def test_a_unit_of_nodes_fits_or_is_refused(unit: int, nodes: tuple[int, int], fits: bool) -> None:
    """P25"""
    settings = read_settings({"node_unit": unit}, {})
    if fits:
        check_node_unit(settings, *nodes)
    else:
        with pytest.raises(UsageError, match=rf"node_unit is {unit} .*no multiple of {unit} lies between"):
            check_node_unit(settings, *nodes)


# --- what is printed ---------------------------------------------------------------------------------------------------------


def test_the_start_prints_every_setting_that_has_an_effect() -> None:
    """P24"""
    line = describe(read_settings({"join_timeout": 60}, {"RALLYPOINT_NODE_UNIT": "2", "RALLYPOINT_READ_TIMEOUT": "9"}))
    assert line.startswith("join_timeout 60 s (--rdzv-conf), last_call_timeout 30 s, ")
    assert "node_unit 2 (RALLYPOINT_NODE_UNIT)" in line
    assert "read_timeout" not in line
    assert "\n" not in line
