"""Steps of diffusers' DiT and of ours on one device in one run; run by tools/bench_diffusers.py.

`modes` names what can be measured, `model` is diffusers' side, `worker` measures in a process of
its own, `main` starts workers and prints. Invariant: modes that share a process share a model and
leave nothing behind but pinned weights; whatever fails ends that process and nothing else.
"""
