-- Results: the last checkpoint of each trial. Effective rank in directions, losses in nats a token on held-out text.
select scale, batch_size as batch, weight_decay as wd, token_budget as budget, round(effective_rank, 2) as effective_rank,
       round(isotropy, 3) as isotropy, round(average_cosine, 3) as cosine, round(loss_docs, 3) as docs,
       round(loss_python, 3) as python, round(loss_maths, 3) as maths, round(loss_cpp, 3) as cpp,
       round(loss_language, 3) as language, round(loss_licences, 3) as licences
from final where sweep = 'demo' order by scale, batch, wd, budget;

-- Which recipe gave the highest effective rank of the unembedding, and did it also give the lowest loss?
select scale, batch_size as batch, weight_decay as wd, token_budget as budget,
       round(effective_rank, 2) as effective_rank, rank() over (order by effective_rank desc) as by_rank,
       round(loss_docs, 3) as held_out_loss, rank() over (order by loss_docs) as by_loss
from final where sweep = 'demo' order by loss_docs limit 5;

-- Did the models learn? Held-out loss of the best model beside the unigram entropy of the same text (nats a token).
select u.domain, round(min(m.value), 3) as best_loss, round(any_value(u.unigram_entropy), 3) as unigram_entropy
from corpora u
join metrics m on m.dataset = u.domain and m.metric = 'loss'
where u.corpus = 'builtin' and u.split = 'heldout' and u.domain = 'docs'
group by u.domain;

-- Does effective rank rise or fall with each axis, all else equal, and does the loss move with it?
with f as (select * from final where sweep = 'demo'),
     pairs as (
       select 'weight decay 0.01 -> 0.1' as change, b.effective_rank - a.effective_rank as rank, b.loss_docs - a.loss_docs as loss
       from f a join f b using (scale, batch_size, token_budget) where a.weight_decay = 0.01 and b.weight_decay = 0.1
       union all
       select 'batch 8 -> 16', b.effective_rank - a.effective_rank, b.loss_docs - a.loss_docs
       from f a join f b using (scale, weight_decay, token_budget) where a.batch_size = 8 and b.batch_size = 16
       union all
       select 'budget doubled', b.effective_rank - a.effective_rank, b.loss_docs - a.loss_docs
       from f a join f b using (scale, weight_decay, batch_size) where 2 * a.token_budget = b.token_budget)
select change, count(*) as pairs, round(avg(rank), 3) as rank_change, round(avg(loss), 3) as loss_change,
       count(*) filter (where sign(rank) = -sign(loss)) as rank_up_and_loss_down_or_reverse
from pairs group by change order by change;

-- Fine-tuned on Python, what does each model gain there and forget of its own text? And in 3 bits, what does it lose by
-- GPTQ and by rounding to the nearest level? Changes of the loss, nats a token.
select scale, batch_size as batch, weight_decay as wd, token_budget as budget,
       round(max(m.value) filter (m.metric = 'finetune_gain'), 3) as gained_on_python,
       round(max(m.value) filter (m.metric = 'forgetting'), 3) as forgotten,
       round(max(m.value) filter (m.metric = 'gptq_loss_increase_3bit' and m.dataset = 'docs'), 5) as gptq_3_bits,
       round(max(m.value) filter (m.metric = 'rtn_loss_increase_3bit' and m.dataset = 'docs'), 5) as rounded_3_bits
from final f join metrics m using (checkpoint) where f.sweep = 'demo' group by all order by scale, batch, wd, budget;
