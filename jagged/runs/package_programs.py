"""Programs that lie beside a package, and call it without jagged: in Python, and in C++."""

from __future__ import annotations

# By file name, for the CPU; and what is else for a GPU, of each line that is.
_PROGRAMS = {
    "score.py": '''"""Score the batch of example.pt; needs torch alone. What each input is stands in manifest.json."""

from pathlib import Path

import torch

here = Path(__file__).parent
score = torch._inductor.aoti_load_package(str(here / "scores.pt2"))
with torch.no_grad():
    for name, found in score(**torch.load(here / "example.pt")).items():
        print(name, found.tolist())
''',
    "score.cpp": """// Scores the batch of example.pt; needs libtorch alone. TORCH is its folder, or that of Python's torch:
//   g++ -std=c++20 -I$TORCH/include -I$TORCH/include/torch/csrc/api/include score.cpp -o score
//       -L$TORCH/lib -ltorch -ltorch_cpu -lc10 -Wl,-rpath,$TORCH/lib
//   ./score .
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/torch.h>

#include <fstream>
#include <iostream>
#include <iterator>

int main(int count, char** words) {
  const std::string here = count > 1 ? words[1] : ".";
  std::ifstream file(here + "/example.pt", std::ios::binary);
  const std::vector<char> bytes{std::istreambuf_iterator<char>(file), {}};
  // In the order of the manifest's inputs; what comes back is in that of its tasks, or items and scores.
  std::vector<at::Tensor> inputs;
  for (const auto& entry : torch::pickle_load(bytes).toGenericDict()) inputs.push_back(entry.value().toTensor());
  c10::InferenceMode mode;
  torch::inductor::AOTIModelPackageLoader loader(here + "/scores.pt2");
  for (const auto& found : loader.run(inputs)) std::cout << found.flatten() << "\\n";
}
""",
}
_FOR_GPU = {
    'for name, found in score(**torch.load(here / "example.pt")).items():': (
        'example = {name: of.cuda() for name, of in torch.load(here / "example.pt").items()}\n'
        "    for name, found in score(**example).items():"
    ),
    "-ltorch -ltorch_cpu": "-Wl,--no-as-needed -ltorch -ltorch_cpu -ltorch_cuda",
    "entry.value().toTensor()": "entry.value().toTensor().to(at::kCUDA)",
    "found.flatten()": "found.flatten().cpu()",
}


def programs_for(device: str) -> dict[str, str]:
    """The programs by file name, for a package on "cpu" or "cuda"."""
    programs = dict(_PROGRAMS)
    for line, other in _FOR_GPU.items() if device == "cuda" else ():
        programs = {name: text.replace(line, other) for name, text in programs.items()}
    return programs
