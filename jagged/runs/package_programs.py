"""Programs that lie beside a package, and call it without jagged: in Python, and in C++."""

from __future__ import annotations

#: By file name.
PROGRAMS = {
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
