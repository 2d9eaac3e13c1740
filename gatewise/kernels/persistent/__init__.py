"""The `persistent` kernel: recurrent weights stay on the chip, and one launch computes a whole sequence.

| module | contents |
|---|---|
| `kernel`, `criteria` | the object that the selection knows: its conditions, its work and its two passes |
| `sizes` | arithmetic on a problem and a device: tilings, choices made for memory, segments, pairs of layers |
| `launches` | every launch of a CUDA kernel: arguments, compilation, failure flag |
| `buffers` | tensors as the launches read them: order of tokens, padding, memory for gradients |
| `schedules` | the order of launches and matrix products that computes a layer, behind the protocol `Schedule` |
| `replay` | a whole stack in memory laid out beforehand, recorded as a CUDA graph and replayed |
| `dry_run` | the memory of a call, counted by running its schedules on tensors without memory |
| `cuda` | the CUDA C++ sources |
"""

from gatewise.kernels.persistent.kernel import persistent

__all__ = ["persistent"]
