"""The Compressive Transformer in plain loops and float64: the judge of the package, which it does not import.

One lane, one token at a time, everything that was ever read is kept. The paper's rules are applied to token
numbers directly: no fixed places, no masks, no shifts. Parameters come as a dictionary of tensors by name.
"""

from __future__ import annotations

import math

import torch


def linear(weights, name, x):
    """x W^T (+ b)."""
    y = weights[f"{name}.weight"] @ x
    return y + weights[f"{name}.bias"] if f"{name}.bias" in weights else y


def layer_norm(weights, name, x):
    """Layer norm with epsilon 1e-5."""
    centred = x - x.mean()
    return centred / torch.sqrt((centred**2).mean() + 1e-5) * weights[f"{name}.weight"] + weights[f"{name}.bias"]


def gelu(x):
    """The exact GELU."""
    return x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))


def sinusoid(distance, width):
    """R(distance): all sines, then all cosines."""
    frequencies = [10_000 ** (-2 * k / width) for k in range(width // 2)]
    values = [math.sin(distance * f) for f in frequencies] + [math.cos(distance * f) for f in frequencies]
    return torch.tensor(values, dtype=torch.float64)


def of_layer(config, name, layer):
    """A field that is one number or a sequence with one for each layer."""
    value = getattr(config, name)
    return value[layer] if isinstance(value, tuple | list) else value


def rotate(numbers, place):
    """RoFormer's rotation: numbers k and k + d/2 as one complex number, times exp(i · place · 10,000^(-2k/d))."""
    width = len(numbers)
    turned = []
    for k in range(width // 2):
        angle = torch.tensor(place * 10_000 ** (-2 * k / width), dtype=torch.float64)
        turned.append(torch.complex(numbers[k], numbers[k + width // 2]) * torch.polar(torch.ones_like(angle), angle))
    return torch.stack([z.real for z in turned] + [z.imag for z in turned])


class Lane:
    """One lane since its document began."""

    def __init__(self, config, weights):
        self.c, self.w = config, weights
        layers = range(config.n_layers)
        own = ("memory_length", "compressed_length", "compression_rate")
        self.n_m, self.n_cm, self.rate = ([of_layer(config, name, layer) for layer in layers] for name in own)
        self.inputs = [[] for _ in layers]  # what attention read of every token since the start
        self.groups = [[] for _ in layers]  # every compressed state since the start
        self.received = [[] for _ in layers]  # attention weights that each token's state received, one a token and head
        self.weights = [[] for _ in layers]  # attention weights of each token's query, one row a head, as `readable`
        self.seen = 0
        self.compression_loss = torch.zeros((), dtype=torch.float64)

    def read(self, tokens):
        """Logits after each token; states of a segment stay in the graph until it is complete."""
        rows = []
        for token in tokens:
            hidden = self.w["embedding.weight"][token]
            for layer in range(self.c.n_layers):
                hidden = self.block(layer, hidden)
            if self.c.norm == "pre":
                hidden = layer_norm(self.w, "final_norm", hidden)
            rows.append(self.w["embedding.weight"] @ hidden)
            self.seen += 1
            if self.seen % self.c.segment_length == 0:
                self.commit()
        return torch.stack(rows)

    def detach(self):
        """What a new call sees of an incomplete segment."""
        self.inputs = [[x.detach() for x in states] for states in self.inputs]

    def block(self, layer, hidden):
        pre, name = self.c.norm == "pre", f"blocks.{layer}"
        state = layer_norm(self.w, f"{name}.attention_norm", hidden) if pre else hidden
        self.inputs[layer].append(state)
        self.received[layer].append([])
        attended = hidden + self.attention(layer)
        if not pre:
            attended = layer_norm(self.w, f"{name}.attention_norm", attended)
        inner = layer_norm(self.w, f"{name}.feed_forward_norm", attended) if pre else attended
        inner = linear(self.w, f"{name}.feed_forward.2", gelu(linear(self.w, f"{name}.feed_forward.0", inner)))
        return attended + inner if pre else layer_norm(self.w, f"{name}.feed_forward_norm", attended + inner)

    def counts(self, layer, committed):
        """Groups compressed and the first token in recent memory, when `committed` tokens are committed."""
        out, rate = max(0, committed - self.n_m[layer]), self.rate[layer]
        if self.n_cm[layer] == 0:
            return 0, out
        return out // rate, out // rate * rate

    def readable(self, layer):
        """(state, place, is compressed) of everything that the newest token may read, oldest first.

        Places are numbers of tokens; of compressed states, where they stand by the numbering.
        """
        c, now = self.c, self.seen
        n_m, n_cm, rate = self.n_m[layer], self.n_cm[layer], self.rate[layer]
        committed = now - now % c.segment_length
        groups, first = self.counts(layer, committed)
        zero = torch.zeros(c.d_model, dtype=torch.float64)
        zeros = c.empty_slots == "zeros"
        # Recent memory begins here, waiting states included, whether or not all its slots are filled yet.
        border = committed - n_m - max(0, committed - n_m) % rate
        for g in range(groups - n_cm, groups):
            if g < 0 and not zeros:
                continue
            if c.compressed_position == "span":
                place = border - (groups - g) * rate + (rate - 1) / 2
            elif c.position == "rotary":
                place = border - (groups - g)  # one sequence with recent memory
            else:
                place = committed - (groups - g)  # as if there were no recent memory
            yield (self.groups[layer][g] if g >= 0 else zero), place, True
        if zeros:
            for token in range(committed - n_m, 0):
                yield zero, token, False
        for token in range(first, now + 1):
            yield self.inputs[layer][token], token, False

    def attention(self, layer):
        c, w, name = self.c, self.w, f"blocks.{layer}.attention"
        width = c.d_model // c.n_heads
        query = linear(w, f"{name}.query", self.inputs[layer][-1])
        _, first = self.counts(layer, self.seen - self.seen % c.segment_length)
        read = list(self.readable(layer))
        mixed = []
        self.weights[layer].append([])
        for head in range(c.n_heads):
            part = slice(head * width, (head + 1) * width)
            scores, values = [], []
            for state, place, compressed in read:
                both = linear(w, f"{name}.key_value", state)
                key, value = both[: c.d_model][part], both[c.d_model :][part]
                values.append(value)
                if c.position == "rotary":
                    scores.append(rotate(query[part], self.seen) @ rotate(key, place) / math.sqrt(width))
                    continue
                own = "compressed_" if compressed and c.compressed_position == "unit" else ""
                relative = linear(w, f"{name}.{own}position", sinusoid(self.seen - place, c.d_model))[part]
                content = (query[part] + w[f"{name}.content_bias"][head]) @ key
                position = (query[part] + w[f"{name}.{own}position_bias"][head]) @ relative
                scores.append((content + position) / math.sqrt(width))
            weights = torch.softmax(torch.stack(scores), 0)
            self.weights[layer][-1].append(weights.tolist())
            for back, received in enumerate(reversed(self.received[layer][first:])):
                received.append(weights[-1 - back].item())  # recent memory and the segment are read last
            mixed.append(sum(weight * value for weight, value in zip(weights, values, strict=True)))
        return linear(w, f"{name}.output", torch.cat(mixed))

    def commit(self):
        c = self.c
        self.detach()
        for layer in range(c.n_layers):
            rate = self.rate[layer]
            old_groups, _ = self.counts(layer, self.seen - c.segment_length)
            groups, _ = self.counts(layer, self.seen)
            evicted = self.inputs[layer][old_groups * rate : groups * rate]
            usage = [sum(r) / len(r) for r in self.received[layer][old_groups * rate : groups * rate]]
            following = self.inputs[layer][groups * rate] if c.compression == "conv-overlap" and evicted else None
            new = self.compress(layer, evicted, usage, following)
            self.groups[layer] += [state if c.compression_loss == "bptt" else state.detach() for state in new]
            if not new or c.compression in ("mean", "max", "most-used"):  # nothing to train
                continue
            if c.compression_loss == "attention":
                self.compression_loss = self.compression_loss + self.reconstruction(layer, evicted, new)
            if c.compression_loss == "auto-encoding":
                self.compression_loss = self.compression_loss + self.auto_encoding(layer, evicted, new)

    def compress(self, layer, evicted, usage, following):
        """All groups of a commit, one state each."""
        c, w, name, rate = self.c, self.w, f"blocks.{layer}.compression", self.rate[layer]
        count = len(evicted) // rate
        if c.compression == "most-used":
            kept = sorted(range(len(evicted)), key=lambda at: usage[at])[len(evicted) - count :]
            return [evicted[at] for at in sorted(kept)]
        old, new, width = evicted, [], rate
        if c.compression == "dilated" and evicted:
            evicted = self.dilated(name, evicted)
        if following is not None:
            evicted, width = [*evicted, following], rate + 1
        for group in (evicted[g * rate : g * rate + width] for g in range(count)):
            if c.compression == "mean":
                new.append(sum(group) / len(group))
            elif c.compression == "max":
                new.append(torch.stack(group).max(0).values)
            elif c.compression == "attention":
                new.append(self.pool(w[f"{name}.queries"], group))
            else:
                taps = w[f"{name}.weight"].view(c.d_model, len(group), -1)
                new.append(sum(taps[:, at] @ state for at, state in enumerate(group)))
        if c.compressed_scale == "rms":
            new = [self.matched(state, old[g * rate : (g + 1) * rate]) for g, state in enumerate(new)]
        return new

    def matched(self, state, group):
        """The state at the root mean square of the group that it replaces."""
        wanted = torch.sqrt(sum((x**2).mean() for x in group) / len(group))
        return state * wanted / torch.sqrt((state**2).mean() + 1e-12)

    def dilated(self, name, states):
        """Convolutions of kernel 2 over states that zeros come before, a ReLU after each."""
        for layer, dilation in enumerate((1, 2, 4)):
            weight = self.w[f"{name}.dilated.{layer}"]
            earlier, own = weight[:, : weight.shape[1] // 2], weight[:, weight.shape[1] // 2 :]
            states = [
                (own @ state + (earlier @ states[at - dilation] if at >= dilation else 0)).clamp(min=0)
                for at, state in enumerate(states)
            ]
        return states

    def pool(self, queries, group):
        """Each query weighs the states and pools its own slice of them."""
        width, pooled = self.c.d_model // len(queries), []
        for head, query in enumerate(queries):
            weights = torch.softmax(torch.stack([query @ state for state in group]) / math.sqrt(self.c.d_model), 0)
            part = slice(head * width, (head + 1) * width)
            pooled.append(sum(weight * state[part] for weight, state in zip(weights, group, strict=True)))
        return torch.cat(pooled)

    def auto_encoding(self, layer, evicted, new):
        """Mean square between the evicted states and what the decoder makes of the compressed ones."""
        weight, rate, total = self.w[f"blocks.{layer}.compression_decoder.weight"], self.rate[layer], 0
        for g, state in enumerate(new):
            decoded = (weight @ state).view(rate, self.c.d_model)
            for at in range(rate):
                total = total + ((decoded[at] - evicted[g * rate + at]) ** 2).sum()
        return total / (len(evicted) * self.c.d_model)

    def reconstruction(self, layer, evicted, new):
        """Algorithm 2: h, old and the projections are constants, only the compressed states are not."""
        c, name = self.c, f"blocks.{layer}.attention"
        width = c.d_model // c.n_heads
        query_weight = self.w[f"{name}.query.weight"].detach()
        both_weight = self.w[f"{name}.key_value.weight"].detach()
        segment = self.inputs[layer][-c.segment_length :]
        total = torch.zeros((), dtype=torch.float64)
        for state in segment:
            query = query_weight @ state
            for head in range(c.n_heads):
                part = slice(head * width, (head + 1) * width)
                results = []
                for slots in (evicted, new):
                    both = [both_weight @ slot for slot in slots]
                    scores = torch.stack([query[part] @ b[: c.d_model][part] / math.sqrt(width) for b in both])
                    weights = torch.softmax(scores, 0)
                    results.append(sum(a * b[c.d_model :][part] for a, b in zip(weights, both, strict=True)))
                total = total + ((results[0] - results[1]) ** 2).sum()
        return total / (len(segment) * c.d_model)
