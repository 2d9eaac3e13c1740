"""Show which kernel would run, why others would not, and predicted times, for a GPU that need not be present."""

import gatewise
from gatewise import Device

layer = gatewise.LSTM(512, 512, num_layers=2, device="meta")  # a layer without memory is sufficient

print(gatewise.explain(layer, (100, 64, 512), device="h200"))
print()

# A device of your own is the numbers that choosing needs: here an H200 with a tenth of the bandwidth, without cuDNN.
invented = Device.named("h200").replace(name="an invented GPU", memory_bandwidth=4.3e11, cudnn_version=0)
decision = gatewise.explain(layer, (100, 64, 512), device=invented)
print("without cuDNN:", decision.chosen, "because", decision.reason)
for refusal in decision.verdict("cudnn").refusals:
    print("cudnn refuses:", refusal)
