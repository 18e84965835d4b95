"""cuDNN and the device that it runs on: graphs are built once for a shape, bound to tensors, and run."""

from collections.abc import Mapping
from types import ModuleType
from typing import Any

import numpy as np

from flamia_ref._errors import line
from flamia_ref.adapters.cudnn_graphs import Graph, Number, Problem
from flamia_ref.adapters.operands import Payload
from flamia_ref.adapters.refusal import Refused
from flamia_ref.adapters.tensors import e4m3, to_numpy, to_torch

Array = np.ndarray[Any, Any]


class Session:
    """cuDNN and the device that it runs on, for one adapter."""

    def __init__(self, kernel: str, torch: ModuleType, module: ModuleType, device: Any) -> None:
        self.kernel, self.torch, self.cudnn, self.device = kernel, torch, module, device
        self.handle = module.create_handle()
        module.set_stream(handle=self.handle, stream=torch.cuda.current_stream().cuda_stream)
        self.built: dict[Any, Graph] = {}

    def put(self, array: Array) -> Any:
        """An array as a tensor of the device."""
        return to_torch(self.torch, array, self.device)

    def number(self, value: float) -> Any:
        """A number as a tensor [1, 1, 1, 1] of the device."""
        return self.torch.full((1, 1, 1, 1), value, dtype=self.torch.float32, device=self.device)

    def sink(self, sink: Array | None) -> dict[str, Any]:
        """The sink as cuDNN takes it, if there is one."""
        if sink is None:
            return {}
        return {"sink_token": self.put(np.asarray(sink, np.float32)).reshape(1, -1, 1, 1)}

    def payloads(self, payloads: Mapping[str, Payload]) -> dict[str, Any]:
        """Codes and scales by the names of the arguments that take them."""
        found = {}
        for name, one in payloads.items():
            found[name] = e4m3(self.torch, one.codes, self.device)
            found[f"descale_{name}"] = self.put(one.scales)
        return found

    def run(self, make: Any, number: Number, problem: Problem, given: Mapping[str, Any]) -> Any:
        """Build a graph, or take it from an earlier document of that shape, and run it.

        Raises Refused where cuDNN has no kernel for it.
        """
        torch = self.torch
        one = self._graph(make, number, problem)
        results = {}
        for name, tensor in one.outputs.items():
            kind = torch.bfloat16 if name in ("o", "dq", "dk", "dv") else torch.float32
            shape, strides = tuple(tensor.get_dim()), tuple(tensor.get_stride())
            # Filled with NaN, so that an element that no kernel wrote cannot look right.
            flat = torch.full((int(np.prod(shape)),), torch.nan, dtype=kind, device=self.device)
            results[name] = flat.as_strided(shape, strides)
        bound = {tensor: given[name] for name, tensor in one.inputs.items()}
        bound |= {tensor: results[name] for name, tensor in one.outputs.items()}
        size = max(one.graph.get_workspace_size(), 1)
        workspace = torch.empty(size, dtype=torch.uint8, device=self.device)
        one.graph.execute(bound, workspace, handle=self.handle)
        torch.cuda.synchronize()
        return results

    def named(self, results: Mapping[str, Any]) -> dict[str, Array]:
        """Results by the names of the protocol, each [rows, heads, channels], the LSE [heads, rows]."""
        found = {}
        for theirs, ours in (("o", "out"), ("dq", "dq"), ("dk", "dk"), ("dv", "dv")):
            if theirs in results:
                found[ours] = to_numpy(self.torch, results[theirs][0].transpose(0, 1))
        if "stats" in results:
            found["lse"] = to_numpy(self.torch, results["stats"][0, :, :, 0])
        if "dSink_token" in results:
            found["dsink"] = to_numpy(self.torch, results["dSink_token"].reshape(-1))
        return found

    def _graph(self, make: Any, number: Number, problem: Problem) -> Graph:
        key = (make, number, problem)
        if key not in self.built:
            modes = self.cudnn.heur_mode
            try:
                one: Graph = make(self.cudnn, number, problem, self.handle)
                one.graph.validate()
                one.graph.build_operation_graph()
                one.graph.create_execution_plans([modes.A, modes.FALLBACK])
                one.graph.check_support()
                one.graph.build_plans()
            except Exception as error:
                # Some of what it does not support comes late, as an error of another type.
                unsupported = isinstance(error, self.cudnn.cudnnGraphNotSupportedError)
                if unsupported or "NOT_SUPPORTED" in str(error):
                    raise Refused(
                        self.kernel, f"is not supported by cuDNN here: {line(str(error))}"
                    ) from error
                raise
            self.built[key] = one
        return self.built[key]
