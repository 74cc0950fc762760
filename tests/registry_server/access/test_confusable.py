import pytest

from registry_server.access.namespaces import RESERVED_NAMES, fold_name, is_reserved


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("apple", "app1e"),
        ("apple", "appie"),
        ("google", "g00gle"),
        ("sql-gen", "sqlgen"),
        ("sql-gen", "s-q-l-gen"),
        ("modern", "modem"),
        ("vvorld", "world"),
        ("acme-1", "acme-l"),
    ],
)
def test_names_that_look_alike_have_one_skeleton(name: str, other: str) -> None:
    assert fold_name(name) == fold_name(other)


@pytest.mark.parametrize(
    ("name", "other"), [("acme", "acne"), ("sql", "sq"), ("sql2", "sql3"), ("a", "b")]
)
def test_names_that_differ_to_the_eye_have_two(name: str, other: str) -> None:
    assert fold_name(name) != fold_name(other)


def test_a_skeleton_is_its_own_skeleton() -> None:
    for name in [*RESERVED_NAMES, "modern-w1ll0w", "v-v-rn-n"]:
        assert fold_name(fold_name(name)) == fold_name(name)


def test_reserved_words_and_what_looks_like_them() -> None:
    assert all(is_reserved(word) for word in RESERVED_NAMES)
    assert is_reserved("adm1n")
    assert is_reserved("r00t")
    assert not is_reserved("acme")
