"""WHERE WEIGHTS LIVE: regions of host memory that several ranks share and CUDA can copy from.

    limits.py     what the host allows, before anything is created
    numa.py       nodes, placement, CPUs
    domain.py     who shares with whom
    board.py      notes between the processes that share
    vigil.py      waiting for them, never for a dead one
    arena.py      SysV segments
    pinning.py    registration with CUDA
    request.py    what a caller asks for and hands in
    leader.py     create, place, fill, verify, seal
    lending.py    or take what a weight server holds
    lifecycle.py  opening and closing, step by step
    summary.py    what became of it
    tensor.py     an arena as a torch tensor; alone here to import torch

States of an arena, and who may move it. Only the leader writes the state; each arrow is one note.

    (none) --leader--> created    the segment exists, is attached, and is marked for removal
    created --leader--> filling   pages have their policy; bytes arrive, counted
    filling --leader--> sealed    complete, stamped, verified; nobody writes again
    (none) --leader--> waiting    a weight server is filling it; bytes counted
    waiting --leader--> sealed    attached to the server's; or created, when nothing came of it
    any ----any rank--> failed    the first error published is the error of all; terminal

The kernel frees the segment with its last attachment: in every state, however processes end.
Followers attach once it is sealed. The leader holds it until all followers have attached.

Threads: the caller's; the filler's own, during `fill`; `arena-vigil`, in the leader during `fill`,
which publishes progress, watches the others and sets `stop`. No thread outlives `open_arena`.
"""
