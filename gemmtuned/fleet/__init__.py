"""Past one machine: hosts of a fleet share what they found through a folder or an object store (docs/fleet.md).

objects.py                     what a store of objects must do; buckets.py and hugging_face.py are its kinds
opening.py                     the store that a URL names
layout.py, record.py           the names in it, and a result as it is stored
claims.py, claiming.py         who tunes what, and which units this host claims next
seen.py                        what a host reports about itself
sync.py                        one exchange; send_results.py and fetch_results.py are its two directions
beside_daemon.py               the child process that exchanges for a running daemon
on_this_host.py, on_ray.py     runs without a daemon: on one device, or on a Ray cluster
pool_client.py                 what such a run claims and puts at the URL
prune.py                       what is removed again
"""
