import pytest
from hypothesis import given
from hypothesis import strategies as st
from shardclip.launch.errors import LaunchError
from shardclip.launch.hostlist import expand_counts, expand_hosts


@pytest.mark.parametrize(
    ("hostlist", "hosts"),
    [
        ("alpha,beta,gamma", ["alpha", "beta", "gamma"]),
        ("alpha", ["alpha"]),
        ("linux[1,2]", ["linux1", "linux2"]),
        ("jean-zay-ia[810-811]", ["jean-zay-ia810", "jean-zay-ia811"]),
        ("node[08-11]", ["node08", "node09", "node10", "node11"]),
        ("node[098-101]", ["node098", "node099", "node100", "node101"]),
        ("a[1-2]b[3-4]", ["a1b3", "a1b4", "a2b3", "a2b4"]),
        ("n[1-2,5],m3,x[7]-ib", ["n1", "n2", "n5", "m3", "x7-ib"]),
        ("gpu-a[1-2].cluster", ["gpu-a1.cluster", "gpu-a2.cluster"]),
        ("[2001-2002]", ["2001", "2002"]),
    ],
)
def test_host_list_is_expanded_as_slurm_does(hostlist, hosts):
    assert expand_hosts(hostlist) == hosts


@pytest.mark.parametrize(
    ("hostlist", "message"),
    [
        ("", "empty"),
        ("  ", "empty"),
        ("n[1-2", "not closed"),
        ("n1-2]", "do not match"),
        ("n[[1]]", "do not match"),
        ("n[3-1]", "backwards"),
        ("n[a-b]", "not a number or a range"),
        ("n[]", "not a number or a range"),
        ("n1,,n2", "empty name"),
        ("n[1-999999999]", "too long"),
    ],
)
def test_malformed_host_list_is_rejected(hostlist, message):
    with pytest.raises(LaunchError, match=message):
        expand_hosts(hostlist)


@given(
    st.lists(
        st.tuples(
            st.from_regex(r"[a-z]+(-[a-z]+)*", fullmatch=True),
            st.integers(0, 200),
            st.integers(0, 20),
            st.integers(1, 4),
        ),
        min_size=1,
        max_size=5,
    )
)
def test_written_ranges_are_read_back(terms):
    text = ",".join(f"{p}[{str(a).zfill(w)}-{str(a + n).zfill(w)}]" for p, a, n, w in terms)
    expected = [f"{p}{str(i).zfill(w)}" for p, a, n, w in terms for i in range(a, a + n + 1)]
    assert expand_hosts(text) == expected


@pytest.mark.parametrize(
    ("text", "counts"),
    [("2(x3),1", [2, 2, 2, 1]), ("4", [4]), ("1(x2)", [1, 1]), ("8,4(x2),8", [8, 4, 4, 8])],
)
def test_tasks_per_node(text, counts):
    assert expand_counts(text) == counts


@pytest.mark.parametrize("text", ["", "2x3", "(x2)", "2(3)", "a"])
def test_malformed_counts_are_rejected(text):
    with pytest.raises(LaunchError, match="SLURM_TASKS_PER_NODE"):
        expand_counts(text)
