"""How weights flow: units of an arena into slots on the GPU, ordered by events.

    files --disk threads--> ring (host) or
    arena (host) --copy queue--> slots, resident buffer (device) --borrow--> compute queue

Files, in the order in which they explain the whole: `source.py` what every source promises and the
resident one; `engine.py` the two queues and the marks in them; `slots.py` device memory and where
units lie in it; `residency.py` which units stay; `log.py` the marks of each use, read as times;
`host.py` where the bytes of units lie in host memory, and until when; `streamer.py` what is copied
when. With lazy_load: `ring.py` places that units pass through, and how ranks agree about them;
`disk.py` the threads that read into them.

Threads and queues, and what each may touch:

- the host thread (the one that runs the model) owns all Python state here. It enqueues copies and
  compute and runs ahead of both. Inside a step it waits for neither and allocates nothing on the
  device. Nothing here is safe to call from a second thread.
- the disk threads (lazy_load; in one process for all that share a ring) are the only writers of the
  ring. They wait for each other, for files, and for words that ranks write into shared memory once
  a copy has ended; never for a device.
- the copy queue (a CUDA stream of high priority) is the only writer of slots and of the resident
  buffer, and the only reader of the arena or ring.
- the compute queue (the CUDA stream that is current when a unit is borrowed) only reads slots and
  the resident buffer, and only between `borrow` and its end.

The host thread may wait for a file, in `borrow`, when the unit's bytes are not there yet. How far
it runs ahead is then bounded by the ring: a place is filled again once it has been copied from.

Two orderings must hold for every use of a unit, and everything here serves them:

1. copy-done before compute: the compute queue waits for the mark that follows the unit's copy;
2. compute-done before the slot is overwritten: the copy queue waits for the mark that compute
   passed when the unit that lies in the slot was given back.

A wait refers to the latest record of its mark at the time of the call, as with CUDA events; both
are issued by the one host thread, in order, so a mark can be recorded again for the next use.
Without CUDA both queues are the host thread itself and both orderings hold trivially; tests run
them on two threads instead.
"""
