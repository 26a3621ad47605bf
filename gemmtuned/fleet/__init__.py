"""Past one machine: hosts of a fleet share what they found through a folder or an object store (docs/fleet.md).

objects.py is what a store of objects must do, buckets.py and hugging_face.py are the kinds there are, opening.py takes
the one that a URL names; layout.py has the names in it, record.py a result as it lies there, claims.py who tunes what,
seen.py what a host tells of itself, sync.py one exchange of all of it; beside.py is the child that exchanges for a
running daemon, prune.py what goes again.
"""
