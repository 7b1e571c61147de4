"""Blocks that cross the features of a row: cross networks, products of pairs, factorization machines, Wukong, MaskNet."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import JaggedTensor

from jagged.models.experts import GroupedLinear
from jagged.modules import JaggedModule, LayerNorm, with_values
from jagged.modules.jagged_tensor import check_samples
from jagged.ops import ACTIVATIONS, Activation, jagged_cross, jagged_dense_add, jagged_dense_bmm, jagged_linear

Device = torch.device | str | None


class CrossNet(JaggedModule):
    """Cross the features of a row with one another: each layer multiplies what it makes of the layer before by the first input.

    With x_0 the input: `x_{l+1} = x_0 * (W_l x_l + b_l) + x_l`. After n layers there are products of up to n + 1 features. With
    experts a layer is a mixture: `x_{l+1} = sum_i g_i(x_l) x_0 * (U_i f(C_i f(V_i x_l)) + b_l) + x_l`, where the gates g are a
    softmax of `G_l x_l` over the experts, and f is the activation.

    Args:
        in_features: width D of rows in and out.
        num_layers: layers, at least one.
        rank: r of `W = U V^T`, U and V `[D, r]`, which costs `2 D r` in place of `D^2`; None for whole matrices. Of experts it is
            the rank of each.
        num_experts: K experts a layer, which need a rank; None for no mixture. One expert has no gate.
        activation: f of experts, `"relu"`, `"silu"` or `"gelu"`.
        device: where parameters live; `"meta"` allocates nothing.

    Shape:
        `[*, D]` floats in and out, in the dtype of the input; under `torch.autocast` products are of its dtype and sums of the
        input's. Or a JaggedTensor with values `[S, D - C]` and a context `[B, C]` in, of which each row has its sample's before
        its own columns, and `[S, D]` out: no row gets a copy of the context, which the first layer multiplies once a sample.

    Raises:
        ValueError: no layer, a rank or number of experts below 1, experts without a rank, an unknown activation; rows of another
            width; a JaggedTensor without a context, or a context without one.

    Source:
        Wang et al., DCN V2: Improved Deep & Cross Network and Practical Lessons for Web-scale Learning to Rank Systems, WWW
        2021, equations 1 to 4.

    Example:
        >>> import torch
        >>> from jagged.models import CrossNet
        >>> CrossNet(40, 2, rank=8)(torch.randn(5, 40)).shape
        torch.Size([5, 40])
        >>> CrossNet(40, 2, rank=8, num_experts=4)(torch.randn(5, 40)).shape
        torch.Size([5, 40])
    """

    shown = ("in_features", "rank", "num_experts")

    def __init__(
        self,
        in_features: int,
        num_layers: int = 3,
        *,
        rank: int | None = None,
        num_experts: int | None = None,
        activation: Activation = "relu",
        device: Device = None,
    ) -> None:
        super().__init__()
        if num_layers < 1:
            raise ValueError(f"num_layers: expected 1 or more, got {num_layers}; without layers nothing is crossed")
        if rank is not None and rank < 1:
            raise ValueError(f"rank: expected 1 or more, got {rank}; use None for whole matrices")
        if num_experts is not None and num_experts < 1:
            raise ValueError(f"num_experts: expected 1 or more, got {num_experts}; use None for no mixture")
        if num_experts is not None and rank is None:
            raise ValueError(f"rank: expected a number, got None; {num_experts} experts are of low rank")
        if activation not in ACTIVATIONS:
            known = ", ".join(map(repr, ACTIVATIONS))
            raise ValueError(f"activation: expected one of {known}, got {activation!r}; experts are not linear")
        self.in_features = in_features
        self.rank = rank
        self.num_experts = num_experts

        def layer() -> nn.Module:
            if rank is None:
                return nn.Linear(in_features, in_features, device=device)
            if num_experts is not None:
                return _Experts(in_features, rank, num_experts, activation, device)
            return nn.Sequential(
                nn.Linear(in_features, rank, bias=False, device=device), nn.Linear(rank, in_features, device=device)
            )

        self.layers = nn.ModuleList(layer() for _ in range(num_layers))

    def forward(self, x: Tensor | JaggedTensor, context: Tensor | None = None) -> Tensor:
        """Cross each row's features, also with its sample's."""
        _check_context(x, context, "[B, C]")
        if isinstance(x, JaggedTensor):
            return self._with_context(x.values(), x.offsets(), cast(Tensor, context))
        _check_last("x", x, self.in_features)
        crossed = x
        for layer in self.layers:
            crossed = torch.addcmul(crossed, x, layer(crossed))
        return crossed

    def _with_context(self, own: Tensor, offsets: Tensor, context: Tensor) -> Tensor:
        if own.shape[1] + context.shape[1] != self.in_features:
            raise ValueError(
                f"x: expected {self.in_features} features with the context's, got {own.shape[1]} and {context.shape[1]} of it"
            )

        def of_both(linear: nn.Linear) -> Tensor:
            """A layer on the context, once a sample, and on the rows."""
            weight, width = linear.weight, context.shape[1]
            of_context = F.linear(context, weight[:, :width], linear.bias)
            return jagged_linear(own, offsets, weight[:, width:], context=of_context)

        crossed = None
        for layer in self.layers:
            if crossed is not None:
                made = layer(crossed)
            elif isinstance(layer, nn.Linear):
                made = of_both(layer)
            elif isinstance(layer, _Experts):
                made = layer.raised(of_both(layer.down), None if layer.gate is None else of_both(layer.gate))
            else:
                down, up = cast(nn.Sequential, layer)
                made = up(of_both(cast(nn.Linear, down)))
            crossed = jagged_cross(made, offsets, context, own, crossed)
        return cast(Tensor, crossed)


class _Experts(JaggedModule):
    """The gated sum of a layer's experts, `sum_i g_i(x) U_i f(C_i f(V_i x)) + b`.

    All experts have the bias, and gates sum to 1: so it is added once, and what multiplies by x_0 does so once. A gate is a
    factor of the expert's r numbers, so that the sum over the experts is that of one product with all U side by side.
    """

    def __init__(self, width: int, rank: int, count: int, activation: Activation, device: Device) -> None:
        super().__init__()
        self.activation = activation
        self.down = nn.Linear(width, count * rank, bias=False, device=device)
        self.inner = GroupedLinear(rank, rank, count, bias=False, activation=activation, device=device)
        # Scaled as one expert's, since gates may choose one alone.
        self.up = GroupedLinear(rank, width, count, bias=False, device=device)
        self.gate = nn.Linear(width, count, bias=False, device=device) if count > 1 else None
        self.bias = nn.Parameter(torch.zeros(width, device=device))

    def reset_parameters(self) -> None:
        super().reset_parameters()
        nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        return self.raised(self.down(rows), None if self.gate is None else self.gate(rows)).view(x.shape)

    def raised(self, low: Tensor, gates: Tensor | None) -> Tensor:
        """The sum of the experts, `[N, D]`, of V x and the gates' logits."""
        low = self.inner(ACTIVATIONS[self.activation](low).unflatten(1, self.inner.weight.shape[:2]))
        if gates is not None:
            low = low * gates.softmax(1)[:, :, None]
        # The experts' matrices side by side.
        return torch.addmm(self.bias, low.flatten(1), self.up.weight.transpose(1, 2).flatten(0, 1))


class DotInteraction(JaggedModule):
    """Scalar products of all pairs of a row's feature vectors, and of these with its sample's.

    Each row has n vectors of width d, X. The pairs are the upper triangle of `X X^T` without the diagonal, row by row. Rows of a
    jagged tensor may have a context, m vectors of each sample, as the user's of candidates: the products with these, `n * m`,
    follow. The context is copied for no row. What its vectors give with one another is `DotInteraction()(context)`, once a
    sample.

    Shape:
        x: `[N, n, d]`, out `[N, n (n - 1) / 2]`; or a JaggedTensor with values `[sum L, n, d]` and context `[B, m, d]` or None,
        out a JaggedTensor with values `[sum L, n (n - 1) / 2 + n m]`. Floats, one dtype.

    Raises:
        ValueError: values of another rank, a context of another width or number of samples, or for rows that are not jagged.

    Source:
        Naumov et al., Deep Learning Recommendation Model for Personalization and Recommendation Systems, 2019, section 2.1.3.

    Example:
        >>> import torch
        >>> from torchrec.sparse.jagged_tensor import JaggedTensor
        >>> from jagged.models import DotInteraction
        >>> candidates = JaggedTensor(values=torch.randn(7, 3, 8), offsets=torch.tensor([0, 3, 3, 7]))
        >>> users = torch.randn(3, 4, 8)
        >>> DotInteraction()(candidates, users).values().shape, DotInteraction()(users).shape
        (torch.Size([7, 15]), torch.Size([3, 6]))
    """

    def forward(self, x: JaggedTensor | Tensor, context: Tensor | None = None) -> JaggedTensor | Tensor:
        """Return the products of each row."""
        values = x if isinstance(x, Tensor) else x.values()
        if values.dim() != 3:
            raise ValueError(f"x: expected values [sum L, n, d], got {list(values.shape)}; a row has n vectors of one width")
        n, width = values.shape[1:]
        first, second = torch.triu_indices(n, n, 1, device=values.device).unbind()
        pairs = (values @ values.transpose(1, 2)).flatten(1)[:, first * n + second]
        if isinstance(x, Tensor):
            if context is not None:
                raise ValueError(f"context: expected None, got {list(context.shape)}; rows of a JaggedTensor have samples")
            return pairs
        if context is None:
            return with_values(x, pairs)
        offsets = x.offsets()
        if context.dim() != 3 or context.shape[2] != width:
            raise ValueError(
                f"context: expected vectors [B, m, d] with d = {width}, as wide as those of x, got {list(context.shape)}"
            )
        check_samples("context", context.shape[0], "x", offsets.shape[0] - 1, "each sample has its own vectors")
        # A row's vectors as rows of their own: each sample's block meets one matrix.
        products = jagged_dense_bmm(values.flatten(0, 1), offsets * n, context.transpose(1, 2))
        # In two steps: where one splits and joins, Inductor takes a number of rows that it does not know for 1.
        products = products.view(values.shape[0], n, context.shape[1]).flatten(1)
        return with_values(x, torch.cat([pairs, products], 1))


class FactorizationMachine(JaggedModule):
    """The sum of the products of all pairs of a row's tokens, `sum_{i<j} v_i * v_j = ((sum_i v_i)^2 - sum_i v_i^2) / 2`.

    Squares are not subtracted, since where one token is much larger than the others little of the difference would be left. Each
    half of the tokens is multiplied by the other half, and their sums are the tokens of the next round: as much work, and no
    difference.

    Args:
        keep_dim: keep the d products of each row apart; else they are summed.

    Shape:
        `[*, n, d]` floats in; `[*, 1]` out, or `[*, d]` where products are kept apart, in the dtype of the input. Of one token
        there is no pair, and the result is zero.

    Raises:
        ValueError: rows without tokens.

    Source:
        Rendle, Factorization Machines, ICDM 2010, section III.B; kept apart: He and Chua, Neural Factorization Machines for
        Sparse Predictive Analytics, SIGIR 2017, equations 3 and 4.

    Example:
        >>> import torch
        >>> from jagged.models import FactorizationMachine
        >>> x = torch.tensor([[[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]])
        >>> FactorizationMachine()(x), FactorizationMachine(keep_dim=True)(x)
        (tensor([[67.]]), tensor([[23., 44.]]))
    """

    shown = ("keep_dim",)

    def __init__(self, *, keep_dim: bool = False) -> None:
        super().__init__()
        self.keep_dim = keep_dim

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum of each row's pairs."""
        if x.dim() < 2 or x.shape[-2] < 1:
            raise ValueError(f"x: expected tokens [*, n, d] with n of 1 or more, got {list(x.shape)}; a row has n vectors")
        # Zeros that are of x, so that one token has a gradient, too.
        pairs = x[..., :0, :].sum(-2)
        while x.shape[-2] > 1:
            half = x.shape[-2] // 2
            first, second, odd = x.split([half, half, x.shape[-2] - 2 * half], -2)
            pairs = pairs + (first * second).sum(-2)
            x = first + second
            if odd.shape[-2]:
                x = torch.cat([x, odd], -2)
        return pairs if self.keep_dim else pairs.sum(-1, keepdim=True)


class FeatureTokens(JaggedModule):
    """Project the features of a row, of any widths, to tokens of one width: what blocks of tokens take.

    Each feature has a matrix and a bias of its own. All features of one width are one batched product. Features of one width
    that stand side by side are read where they lie.

    Args:
        widths: of the n features, in the order in which they stand in a row.
        token_dim: width d of tokens.
        device: where parameters live; `"meta"` allocates nothing.

    Shape:
        `[*, sum of widths]` floats in, as the values of a KeyedTensor are; `[*, n, d]` out, token i of feature i.

    Raises:
        ValueError: no features, a width below 1; rows of another width.

    Example:
        >>> import torch
        >>> from jagged.models import FeatureTokens
        >>> FeatureTokens([16, 4, 16, 1], 8)(torch.randn(5, 37)).shape
        torch.Size([5, 4, 8])
    """

    shown = ("widths", "token_dim")

    def __init__(self, widths: Sequence[int], token_dim: int, *, device: Device = None) -> None:
        super().__init__()
        if not widths or min(widths) < 1:
            raise ValueError(f"widths: expected at least one, each 1 or more, got {list(widths)}; leave out features of no width")
        _check_sizes(token_dim=token_dim)
        self.widths = tuple(widths)
        self.token_dim = token_dim
        # Features of one width side by side: (width, how many).
        self.runs = [(width, len(list(run))) for width, run in itertools.groupby(self.widths)]
        self.projections = nn.ModuleDict(
            {str(width): GroupedLinear(width, token_dim, self.widths.count(width), device=device) for width in dict(self.runs)}
        )

    def forward(self, x: Tensor) -> Tensor:
        """Project each feature."""
        _check_last("x", x, sum(self.widths))
        runs = x.reshape(-1, x.shape[-1]).split([width * count for width, count in self.runs], 1)
        of_width: dict[int, list[Tensor]] = {}
        for (width, count), run in zip(self.runs, runs, strict=True):
            of_width.setdefault(width, []).append(run.unflatten(1, (count, width)))
        tokens: dict[int, list[Tensor]] = {}
        for width, parts in of_width.items():
            projected = self.projections[str(width)](_joined(parts))
            tokens[width] = list(projected.split([part.shape[1] for part in parts], 1))
        return _joined([tokens[width].pop(0) for width, _ in self.runs]).reshape(*x.shape[:-1], len(self.widths), self.token_dim)


class WukongLayer(JaggedModule):
    """Make new tokens of a row's: some of the products of all pairs, some linear combinations of the tokens.

    `X' = LN([FMB(X); W_L X] + R)`. The residual R is X where there are as many tokens as before, else `W_r X`. The products are
    `X X^T Y`, in the order `X (X^T Y)`, which never makes the n^2 products: `FMB(X) = MLP(LN(flatten(X (X^T Y))))`, cut into
    tokens. Y, W_L and W_r meet X in one product.

    Args:
        num_tokens: n tokens in.
        token_dim: width d of tokens.
        num_fm_tokens: n_F tokens out that are made of products.
        num_linear_tokens: n_L tokens out that are linear combinations.
        rank: k columns of Y.
        hidden_sizes: widths of the MLP's hidden layers, each with a ReLU behind it; none for one linear layer.
        device: where parameters live; `"meta"` allocates nothing.

    Shape:
        `[*, n, d]` floats in, `[*, n_F + n_L, d]` out. Or a JaggedTensor with values `[S, n - c, d]` and a context `[B, c, d]`
        in, of which each row has its sample's tokens before its own, and `[S, n_F + n_L, d]` out: no row gets a copy of the
        context.

    Raises:
        ValueError: a size below 1; rows of other tokens; a JaggedTensor without a context, or a context without one.

    Source:
        Zhang et al., Wukong: Towards a Scaling Law for Large-Scale Recommendation, ICML 2024, sections 3.2 to 3.5. Y does not
        depend on X here.

    Example:
        >>> import torch
        >>> from jagged.models import WukongLayer
        >>> WukongLayer(6, 8, num_fm_tokens=3, num_linear_tokens=2, rank=4)(torch.randn(5, 6, 8)).shape
        torch.Size([5, 5, 8])
    """

    shown = ("num_tokens", "token_dim", "num_fm_tokens", "num_linear_tokens", "rank")

    def __init__(
        self,
        num_tokens: int,
        token_dim: int,
        *,
        num_fm_tokens: int,
        num_linear_tokens: int,
        rank: int,
        hidden_sizes: Sequence[int] = (),
        device: Device = None,
    ) -> None:
        super().__init__()
        _check_sizes(
            num_tokens=num_tokens,
            token_dim=token_dim,
            num_fm_tokens=num_fm_tokens,
            num_linear_tokens=num_linear_tokens,
            rank=rank,
            hidden_sizes=min(hidden_sizes, default=1),
        )
        self.num_tokens = num_tokens
        self.token_dim = token_dim
        self.num_fm_tokens = num_fm_tokens
        self.num_linear_tokens = num_linear_tokens
        self.rank = rank
        num_out = num_fm_tokens + num_linear_tokens
        # Y^T, as its columns are combinations of tokens like those of the others.
        self.pairs = nn.Linear(num_tokens, rank, bias=False, device=device)
        self.linear = nn.Linear(num_tokens, num_linear_tokens, bias=False, device=device)
        self.residual = nn.Linear(num_tokens, num_out, bias=False, device=device) if num_out != num_tokens else None
        widths = [num_tokens * rank, *hidden_sizes, num_fm_tokens * token_dim]
        layers: list[nn.Module] = [LayerNorm(widths[0], autocast_output=True, device=device)]
        for a, b in itertools.pairwise(widths):
            layers += [nn.Linear(a, b, device=device), nn.ReLU()]
        self.mlp = nn.Sequential(*layers[:-1])
        self.norm = LayerNorm(token_dim, device=device)

    def forward(self, x: Tensor | JaggedTensor, context: Tensor | None = None) -> Tensor:
        """Return each row's new tokens, made of its own and of its sample's."""
        _check_context(x, context, "[B, c, d]")
        mixers = [self.pairs, self.linear, *([] if self.residual is None else [self.residual])]
        weight = torch.cat([mixer.weight for mixer in mixers])
        if isinstance(x, JaggedTensor):
            return self._with_context(x.values(), x.offsets(), cast(Tensor, context), weight)
        _check_tokens(x, self.num_tokens, self.token_dim)
        of_pairs, linear, *residual = self._split(F.linear(x.transpose(-1, -2), weight))
        return self.norm(self._tokens(x @ of_pairs, linear) + (residual[0].transpose(-1, -2) if residual else x))

    def _split(self, mixed: Tensor) -> tuple[Tensor, ...]:
        """Cut `[*, d, k + n_L + ...]`: a matrix on the left of tokens is one on the right of what is transposed."""
        sizes = [self.rank, self.num_linear_tokens, *([] if self.residual is None else [self.residual.out_features])]
        return mixed.split(sizes, -1)

    def _tokens(self, products: Tensor, linear: Tensor) -> Tensor:
        crossed = self.mlp(products.flatten(-2)).unflatten(-1, (self.num_fm_tokens, self.token_dim))
        return torch.cat([crossed, linear.transpose(-1, -2)], -2)

    def _with_context(self, own: Tensor, offsets: Tensor, context: Tensor, weight: Tensor) -> Tensor:
        _check_tokens(own, self.num_tokens - context.shape[1], self.token_dim)
        count, width, dim = own.shape[0], context.shape[1], self.token_dim
        turned = context.transpose(1, 2)
        of_context, of_own = F.linear(turned, weight[:, :width]), F.linear(own.transpose(1, 2), weight[:, width:])
        mixed = jagged_dense_add(of_own.flatten(1), offsets, of_context.flatten(1)).unflatten(1, (dim, -1))
        of_pairs, linear, *residual = self._split(mixed)
        # The k combinations of a row are rows of its sample, which meet its tokens.
        rows = of_pairs.transpose(1, 2).reshape(-1, dim)
        of_both = jagged_dense_bmm(rows, offsets * self.rank, turned).view(count, self.rank, width).transpose(1, 2)
        tokens = self._tokens(torch.cat([of_both, torch.bmm(own, of_pairs)], 1), linear)
        if residual:
            return self.norm(tokens + residual[0].transpose(1, 2))
        first = jagged_dense_add(tokens[:, :width].flatten(1), offsets, context.flatten(1)).unflatten(1, (width, dim))
        return self.norm(torch.cat([first, tokens[:, width:] + own], 1))


class Wukong(JaggedModule):
    """A stack of `WukongLayer`: after l layers tokens have products of up to 2^l of a row's.

    Args:
        num_tokens: n tokens in; a `FeatureTokens` makes them of features of unequal widths.
        token_dim: width d of tokens.
        num_layers: layers, at least one.
        num_fm_tokens: n_F tokens of each layer that are made of products.
        num_linear_tokens: n_L tokens of each layer that are linear combinations.
        rank: k, how many combinations of its tokens each token meets.
        hidden_sizes: widths of the hidden layers of each layer's MLP.
        device: where parameters live; `"meta"` allocates nothing.

    Shape:
        `[*, n, d]` floats in, `[*, n_F + n_L, d]` out. Or, as of the first `WukongLayer`, a JaggedTensor and a context in.

    Raises:
        ValueError: a size below 1; rows of other tokens; a JaggedTensor without a context, or a context without one.

    Source:
        Zhang et al., Wukong: Towards a Scaling Law for Large-Scale Recommendation, ICML 2024, section 3.

    Example:
        >>> import torch
        >>> from jagged.models import FeatureTokens, Wukong
        >>> tokens = FeatureTokens([16, 4, 16, 1], 8)(torch.randn(5, 37))
        >>> Wukong(4, 8, 2, num_fm_tokens=3, num_linear_tokens=3, rank=2, hidden_sizes=[32])(tokens).shape
        torch.Size([5, 6, 8])
    """

    def __init__(
        self,
        num_tokens: int,
        token_dim: int,
        num_layers: int = 3,
        *,
        num_fm_tokens: int,
        num_linear_tokens: int,
        rank: int,
        hidden_sizes: Sequence[int] = (),
        device: Device = None,
    ) -> None:
        super().__init__()
        _check_sizes(num_layers=num_layers)
        self.layers = nn.ModuleList(
            WukongLayer(
                num_fm_tokens + num_linear_tokens if layer else num_tokens,
                token_dim,
                num_fm_tokens=num_fm_tokens,
                num_linear_tokens=num_linear_tokens,
                rank=rank,
                hidden_sizes=hidden_sizes,
                device=device,
            )
            for layer in range(num_layers)
        )

    def forward(self, x: Tensor | JaggedTensor, context: Tensor | None = None) -> Tensor:
        """Return each row's last tokens, made of its own and of its sample's."""
        first, *others = self.layers
        tokens = first(x, context)
        for layer in others:
            tokens = layer(tokens)
        return cast(Tensor, tokens)


class MaskBlock(JaggedModule):
    """A layer whose input is multiplied by a mask that the whole row gives: `relu(LN(W (mask * h)))`.

    With e the row: `mask = W_2 relu(W_1 e + b_1) + b_2`, as wide as h. h is `LN(x)` of a first block, where x is the row itself,
    or x as it is of a later one, where it is what the block before gave.

    Args:
        in_features: width of x.
        out_features: width of rows out.
        guide_features: width D of the row e that gives the mask; None for that of x.
        mask_features: hidden width of the mask; None for `2 D`.
        normalize: normalise x first.
        device: where parameters live; `"meta"` allocates nothing.

    Shape:
        x `[*, in_features]` floats, guide `[*, guide_features]` or None for x itself; `[*, out_features]` out.

    Raises:
        ValueError: a size below 1; rows of another width, or no guide where it has another width than x.

    Source:
        Wang et al., MaskNet: Introducing Feature-Wise Multiplication to CTR Ranking Models by Instance-Guided Mask, DLP-KDD 2021,
        sections 3.2 and 3.3. There each feature of a first block is normalised by itself, here the row.

    Example:
        >>> import torch
        >>> from jagged.models import MaskBlock
        >>> row = torch.randn(5, 40)
        >>> hidden = MaskBlock(40, 16)(row)
        >>> MaskBlock(16, 8, guide_features=40, normalize=False)(hidden, row).shape
        torch.Size([5, 8])
    """

    shown = ("in_features", "out_features", "guide_features")

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        guide_features: int | None = None,
        mask_features: int | None = None,
        normalize: bool = True,
        device: Device = None,
    ) -> None:
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features
        self.guide_features = guide = in_features if guide_features is None else guide_features
        hidden = 2 * guide if mask_features is None else mask_features
        _check_sizes(in_features=in_features, out_features=out_features, guide_features=guide, mask_features=hidden)
        self.norm = LayerNorm(in_features, device=device) if normalize else None
        self.mask = nn.Sequential(
            nn.Linear(guide, hidden, device=device), nn.ReLU(), nn.Linear(hidden, in_features, device=device)
        )
        # The bias is that of the layer norm.
        self.hidden = nn.Linear(in_features, out_features, bias=False, device=device)
        self.hidden_norm = LayerNorm(out_features, device=device)

    def forward(self, x: Tensor, guide: Tensor | None = None) -> Tensor:
        """Transform each row."""
        _check_last("x", x, self.in_features)
        guide = x if guide is None else guide
        _check_last("guide", guide, self.guide_features)
        masked = self.mask(guide) * (x if self.norm is None else self.norm(x))
        return self.hidden_norm(self.hidden(masked)).relu()


class MaskNet(JaggedModule):
    """Blocks of instance-guided masks, one after the other or side by side.

    One after the other, each `MaskBlock` takes what the one before gave, and the row gives all masks. Side by side, all blocks
    take the row, normalised once, and their results are concatenated; their layers are batched products, not one for each block.

    Args:
        in_features: width D of rows in.
        out_features: width F of each block's rows out.
        num_blocks: blocks, at least one.
        parallel: side by side.
        mask_features: hidden width of each mask; None for `2 D`.
        device: where parameters live; `"meta"` allocates nothing.

    Shape:
        `[*, D]` floats in; `[*, F]` out, or `[*, num_blocks * F]` of blocks side by side.

    Raises:
        ValueError: a size below 1; rows of another width.

    Source:
        Wang et al., MaskNet: Introducing Feature-Wise Multiplication to CTR Ranking Models by Instance-Guided Mask, DLP-KDD 2021,
        section 3.4, without the layers behind the blocks.

    Example:
        >>> import torch
        >>> from jagged.models import MaskNet
        >>> MaskNet(40, 16)(torch.randn(5, 40)).shape, MaskNet(40, 16, parallel=True)(torch.randn(5, 40)).shape
        (torch.Size([5, 16]), torch.Size([5, 48]))
    """

    shown = ("in_features", "out_features", "num_blocks", "parallel")

    def __init__(
        self,
        in_features: int,
        out_features: int,
        num_blocks: int = 3,
        *,
        parallel: bool = False,
        mask_features: int | None = None,
        device: Device = None,
    ) -> None:
        super().__init__()
        hidden = 2 * in_features if mask_features is None else mask_features
        _check_sizes(in_features=in_features, out_features=out_features, num_blocks=num_blocks, mask_features=hidden)
        self.in_features = in_features
        self.out_features = out_features
        self.num_blocks = num_blocks
        self.parallel = parallel
        self.blocks: nn.Module
        if parallel:
            self.blocks = _MaskBlocks(in_features, out_features, num_blocks, hidden, device)
        else:
            self.blocks = nn.ModuleList(
                MaskBlock(
                    out_features if block else in_features,
                    out_features,
                    guide_features=in_features,
                    mask_features=hidden,
                    normalize=not block,
                    device=device,
                )
                for block in range(num_blocks)
            )

    def forward(self, x: Tensor) -> Tensor:
        """Transform each row."""
        _check_last("x", x, self.in_features)
        if self.parallel:
            return self.blocks(x)
        hidden = x
        for block in cast("nn.ModuleList", self.blocks):
            hidden = block(hidden, x)
        return hidden


class _MaskBlocks(nn.Module):
    """Blocks of one input side by side: the first layers of all masks are one product, the other layers batched ones."""

    def __init__(self, in_features: int, out_features: int, count: int, mask_features: int, device: Device) -> None:
        super().__init__()
        self.count = count
        self.norm = LayerNorm(in_features, device=device)
        self.mask = nn.Linear(in_features, count * mask_features, device=device)
        self.mask_out = GroupedLinear(mask_features, in_features, count, device=device)
        self.hidden = GroupedLinear(in_features, out_features, count, bias=False, device=device)
        self.hidden_norm = _LayerNorms(count, out_features, device=device)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        masks = self.mask_out(self.mask(rows).relu().unflatten(1, (self.count, -1)))
        hidden = self.hidden_norm(self.hidden(masks * self.norm(rows)[:, None])).relu()
        return hidden.reshape(*x.shape[:-1], self.count * hidden.shape[2])


class _LayerNorms(nn.Module):
    """Layer norms of `[N, count, width]`, each with a scale and a shift of its own."""

    def __init__(self, count: int, width: int, *, device: Device = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(count, width, device=device))
        self.bias = nn.Parameter(torch.zeros(count, width, device=device))

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)
        nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, x.shape[2:]) * self.weight + self.bias


def _joined(parts: Sequence[Tensor]) -> Tensor:
    """Concatenate along the features; one part is not copied."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), 1)


def _check_sizes(**sizes: int) -> None:
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name}: expected 1 or more, got {size}; without it nothing of a row is left")


def _check_context(x: Tensor | JaggedTensor, context: Tensor | None, shape: str) -> None:
    if isinstance(x, JaggedTensor) != (context is not None):
        raise ValueError(f"context: expected {f'{shape} beside' if context is None else 'None without'} a JaggedTensor")


def _check_last(name: str, x: Tensor, width: int) -> None:
    """Check the last dimension alone, which no batch changes."""
    if not x.dim() or x.shape[-1] != width:
        raise ValueError(
            f"{name}: expected values [*, D] with D = {width}, got {list(x.shape)}; the block's width is set where it is built"
        )


def _check_tokens(x: Tensor, count: int, width: int) -> None:
    if x.dim() < 2 or x.shape[-2:] != (count, width):
        raise ValueError(
            f"x: expected tokens [*, n, d] with n = {count} and d = {width}, got {list(x.shape)}; FeatureTokens makes them of "
            "features of other widths"
        )
