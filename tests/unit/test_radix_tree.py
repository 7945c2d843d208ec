"""RadixTree against a dictionary of prefixes, and the verbs one by one."""

from __future__ import annotations

import itertools
from array import array

from hypothesis import given, settings
from hypothesis import strategies as st

from forkkv.kvcache.radix_tree import RadixTree

BLOCK = 2
NS = ("base", "")


def key(tokens):
    return array("i", tokens).tobytes()


def make_tree(**options):
    return RadixTree(BLOCK, itertools.count(1).__next__, **options)


def publish(tree, tokens, ids, namespace=NS, step=0):
    """Insert whole blocks; the ids that the tree took."""
    lease, _ = tree.acquire(namespace, b"", read=False)
    present = tree.insert(lease, key(tokens), ids, step)
    tree.release(lease)
    return ids[present // BLOCK :]


operations = st.lists(
    st.tuples(st.sampled_from(["insert", "lease", "release", "evict"]), st.lists(st.integers(0, 2), max_size=10)),
    max_size=60,
)


@settings(max_examples=200, deadline=None)
@given(operations)
def test_agrees_with_a_dictionary_of_prefixes(steps):
    tree, model, leases = make_tree(), {}, []
    fresh = itertools.count(1)
    for verb, tokens in steps:
        whole = tokens[: len(tokens) // BLOCK * BLOCK]
        prefixes = [tuple(whole[:end]) for end in range(BLOCK, len(whole) + 1, BLOCK)]
        if verb == "insert":
            ids = [next(fresh) for _ in prefixes]
            publish(tree, whole, ids)
            for prefix, block in zip(prefixes, ids, strict=True):
                model.setdefault(prefix, block)
        elif verb == "lease":
            lease, ids = tree.acquire(NS, key(whole))
            assert ids == [model[p] for p in itertools.takewhile(model.__contains__, prefixes)]
            leases.append((lease, whole[: lease.num_tokens], ids))
        elif verb == "release" and leases:
            tree.release(leases.pop(0)[0])
        elif verb == "evict":
            gone = set(tree.evict(1 + len(whole)))
            model = {prefix: block for prefix, block in model.items() if block not in gone}
        assert tree.peek(NS, key(whole)) == BLOCK * len(list(itertools.takewhile(model.__contains__, prefixes)))
        for lease, _, ids in leases:
            assert tree.covers(lease) == ids, "a leased path stays as it is"
        assert sorted(tree.check([lease for lease, _, _ in leases])) == sorted(model.values())


def test_peek_changes_nothing():
    tree = make_tree()
    publish(tree, [1, 2, 3, 4], [10, 11])
    before = [(n, c) for n, c in tree.namespaces()]
    assert tree.peek(NS, key([1, 2, 9, 9])) == 2
    assert tree.peek(("base", "other"), key([1, 2])) == 0
    assert [(n, c) for n, c in tree.namespaces()] == before and tree.num_leases == 0


def test_insert_takes_only_what_is_missing():
    tree = make_tree()
    assert publish(tree, [1, 2, 3, 4], [10, 11]) == [10, 11]
    assert publish(tree, [1, 2, 3, 4, 5, 6], [20, 21, 22]) == [22]


def test_never_read_leaves_go_first_where_asked():
    tree = make_tree(prefer_unread=True)
    publish(tree, [1, 1], [10])
    publish(tree, [2, 2], [11])
    lease, _ = tree.acquire(NS, key([1, 1]))
    tree.release(lease)
    assert tree.evict(1, unread_only=True) == [11]
    assert tree.evict(1, unread_only=True) == []
    assert tree.evict(1) == [10]


def test_a_leaf_is_evicted_from_its_tail():
    tree = make_tree()
    publish(tree, [1, 2, 3, 4, 5, 6], [10, 11, 12])
    assert tree.evict(1) == [12]
    assert tree.peek(NS, key([1, 2, 3, 4, 5, 6])) == 4


def test_drop_hides_at_once_and_frees_as_leases_end():
    tree = make_tree()
    publish(tree, [1, 2, 3, 4], [10, 11])
    publish(tree, [5, 6], [12])
    lease, _ = tree.acquire(NS, key([1, 2]))
    assert sorted(tree.drop(NS)) == [11, 12]
    assert tree.peek(NS, key([1, 2])) == 0
    assert tree.release(lease) == [10]
    assert tree.num_ids == 0


def test_withdraw_takes_back_one_step_only():
    tree = make_tree()
    publish(tree, [1, 2], [10], step=1)
    tree.settle(1)
    publish(tree, [1, 2, 3, 4], [10, 11], step=2)
    assert tree.withdraw(2) == [11]
    assert tree.peek(NS, key([1, 2, 3, 4])) == 2
