# Audits of released trainers, each in an environment of its own outside the repository.
# Included by the Makefile; every target prints the findings of every function of its file.
TRAINERS ?= .venv-trainers
AUDIT_SIZES ?= --batch-size 16 --accumulation-steps 4,16

$(TRAINERS)/%/.ready: scoreboard/requirements/%.txt
	$(PYTHON) -m venv $(TRAINERS)/$*
	$(TRAINERS)/$*/bin/pip install --quiet --disable-pip-version-check -r $<
	touch $@

# $(call audit,environment,file,functions,name,packages): exit code 1 (different) is an answer, 2 is not. The record of the
# audit goes to $(RESULTS)/audits/<name>.json (its fields: harness/accumulation_harness/audit/released.py), the audited package first.
audit = @mkdir -p $(RESULTS)/audits; rm -f $(RESULTS)/audits/$(4).json; for f in $(3); do echo "== $(2):$$f"; \
	PYTHONPATH=. OMP_NUM_THREADS=1 $(TRAINERS)/$(1)/bin/python -W ignore -m accumulation_harness.audit scoreboard/$(2).py:$$f $(AUDIT_SIZES) \
	--record $(RESULTS)/audits/$(4).json --packages $(5) || [ $$? -eq 1 ] || exit 2; done
comma := ,
CAUSAL := causal_sgd causal_divisible causal_equal_lengths causal_adamw_clipped
HEADS := masked_sgd tokens_sgd sequences_sgd
OTHERS := llama_sgd experts_divisible
OWN_LOSSES := focal_equal_lengths focal weighted_classes focal_counted smoothed_equal_lengths smoothed
FLAGGED := focal_equal_lengths_declared focal_declared weighted_classes_declared
OBJECTIVES := grpo grpo_added grpo_cut_groups dr_grpo dr_grpo_padded dapo dapo_by_completions bnpo ppo ppo_entropy ppo_whitened
PREFERENCES := dpo dpo_with_sft dpo_sorted
GRPO := grpo grpo_bnpo grpo_dr_grpo grpo_dapo grpo_dapo_entropy
RANKING := ranking ranking_cached symmetric_cached ranking_cached_and_accumulated
VERL := token_mean token_mean_entropy_and_kl sequence_mean sequence_norm sequence_norm_constant sequence_policy
VERL += geometric_mean covariance_clipped covariance_penalised
FACTORY := causal causal_with_processor dft asft asft_equal_lengths
DECLARED := masked_declared sequences_declared
NOMINAL := classify classify_batch_norm classify_warmup detect detect_remainder detect_batch_norm
ZOO := schedule_free lookahead sharpness_aware lion lion_not_divided madgrad soap soap_not_divided
ENGINE := divisible clipped zero_1 zero_2 zero_3 muon_zero_2 muon_zero_3 remainder unequal unequal_zero_2

.PHONY: audit-transformers audit-transformers-old audit-accelerate audit-trl audit-lightning audit-keras audit-keras-tensorflow audit-keras-by-hand audit-timm audit-replicas
.PHONY: audit-axolotl audit-accelerate-sharded audit-deepspeed-ranks audit-verl audit-ms-swift audit-llamafactory audit-sentence-transformers audit-trl-objectives audit-trl-kto audit-open-clip audit-pipelining audit-rl-objectives
.PHONY: audit-fastai audit-deepspeed audit-small-engines
.PHONY: audit-ultralytics audit-opacus audit-flair audit-optimizers
.PHONY: audit-transformers-446 audit-transformers-450 audit-transformers-losses audit-trl-024 audit-composer audit-mmengine audit-optax
audit-transformers: $(TRAINERS)/transformers/.ready  ## audit the newest pinned transformers Trainer
	$(call audit,transformers,transformers_trainer,$(CAUSAL) $(HEADS) $(DECLARED),transformers,transformers$(comma)accelerate$(comma)torch)
audit-transformers-old: $(TRAINERS)/transformers-old/.ready  ## audit transformers 4.45.2
	$(call audit,transformers-old,transformers_trainer,$(CAUSAL) $(HEADS),transformers-old,transformers$(comma)accelerate$(comma)torch)
audit-transformers-446: $(TRAINERS)/transformers-446/.ready  ## audit transformers 4.46.3
	$(call audit,transformers-446,transformers_trainer,$(CAUSAL) $(HEADS) $(OTHERS),transformers-446,transformers$(comma)accelerate$(comma)torch)
audit-transformers-450: $(TRAINERS)/transformers-450/.ready  ## audit transformers 4.50.3
	$(call audit,transformers-450,transformers_trainer,$(CAUSAL) $(HEADS) $(OTHERS),transformers-450,transformers$(comma)accelerate$(comma)torch)
audit-transformers-losses: $(TRAINERS)/transformers/.ready $(TRAINERS)/transformers-450/.ready $(TRAINERS)/trl-024/.ready  ## audit own losses and label smoothing
	$(call audit,transformers,transformers_losses,$(OWN_LOSSES) $(FLAGGED),transformers-losses,transformers$(comma)accelerate$(comma)torch)
	$(call audit,trl-024,transformers_losses,$(OWN_LOSSES),transformers-457-losses,transformers$(comma)accelerate$(comma)torch)
	$(call audit,transformers-450,transformers_losses,$(OWN_LOSSES),transformers-450-losses,transformers$(comma)accelerate$(comma)torch)
audit-accelerate: $(TRAINERS)/transformers/.ready  ## audit accelerate
	$(call audit,transformers,accelerate_loops,naive documented documented_without_factor,accelerate,accelerate$(comma)torch)
audit-trl: $(TRAINERS)/transformers/.ready  ## audit trl
	$(call audit,transformers,trl_trainer,sft sft_adamw,trl,trl$(comma)transformers$(comma)accelerate$(comma)torch)
audit-trl-objectives: $(TRAINERS)/transformers/.ready  ## audit trl's DPO with several terms and its GRPO
	$(call audit,transformers,trl_objectives,$(PREFERENCES) $(GRPO),trl-objectives,trl$(comma)transformers$(comma)accelerate$(comma)torch)
audit-trl-kto: AUDIT_SIZES := --batch-size 16 --accumulation-steps 4,8
audit-trl-kto: $(TRAINERS)/transformers/.ready  ## audit trl's KTO with a live and with a vacuous KL term
	$(call audit,transformers,trl_objectives,kto kto_same_reference,trl-kto,trl$(comma)transformers$(comma)accelerate$(comma)torch)
audit-trl-024: $(TRAINERS)/trl-024/.ready  ## audit the preference trainers of trl 0.24.0
	$(call audit,trl-024,preference_trainers,dpo reward orpo,trl-024,trl$(comma)transformers$(comma)accelerate$(comma)torch)
audit-lightning: $(TRAINERS)/lightning/.ready  ## audit lightning
	$(call audit,lightning,lightning_trainer,equal_divisible equal_clipped_scheduled equal_short_window unequal_divisible unequal_short_window,lightning,lightning$(comma)torch)
audit-keras: $(TRAINERS)/keras/.ready  ## audit keras (torch backend)
	$(call audit,keras,keras_fit,sgd_divisible sgd_remainder sgd_scheduled adamw_decay adam_ema,keras,keras$(comma)torch)
audit-keras-tensorflow: $(TRAINERS)/keras-tensorflow/.ready  ## audit keras (TensorFlow backend) by its weights
	$(call audit,keras-tensorflow,keras_weights,sgd_divisible sgd_remainder,keras-tensorflow,keras$(comma)tensorflow_cpu)
audit-keras-by-hand: $(TRAINERS)/keras-tensorflow/.ready  ## audit a GradientTape loop of TensorFlow by its weights
	$(call audit,keras-tensorflow,keras_by_hand,divided undivided divided_remainder divided_remainder_applied,keras-by-hand,keras$(comma)tensorflow_cpu)
audit-optax: $(TRAINERS)/optax/.ready  ## audit optax's MultiSteps by its weights
	$(call audit,optax,optax_steps,sgd_divisible sgd_remainder clipped_scheduled adamw_decay sgd_added,optax,optax$(comma)jax)
audit-composer: $(TRAINERS)/composer/.ready  ## audit MosaicML Composer (torch 2.7.0)
	$(call audit,composer,composer_trainer,samples samples_adamw_clipped tokens_by_samples tokens_by_tokens,composer,mosaicml$(comma)torch)
audit-mmengine: $(TRAINERS)/mmengine/.ready  ## audit mmengine
	$(call audit,mmengine,mmengine_runner,clipped_divisible remainder schedule_by_iteration schedule_by_epoch average,mmengine,mmengine$(comma)torch)
audit-sentence-transformers: $(TRAINERS)/sentence-transformers/.ready  ## audit sentence-transformers' in-batch negatives, plain and cached
	$(call audit,sentence-transformers,sentence_pairs,$(RANKING),sentence-transformers,sentence-transformers$(comma)transformers$(comma)torch)
audit-verl: $(TRAINERS)/verl/.ready  ## audit verl's actor losses in a thin loop
	$(call audit,verl,verl_losses,$(VERL),verl,verl$(comma)torch)
audit-ms-swift: $(TRAINERS)/ms-swift/.ready  ## audit ms-swift's trainer
	$(call audit,ms-swift,swift_trainer,causal dft smoothed smoothed_equal_lengths,ms-swift,ms_swift$(comma)transformers$(comma)torch)
audit-llamafactory: $(TRAINERS)/llamafactory/.ready  ## audit LLaMA-Factory's trainer
	$(call audit,llamafactory,llamafactory_trainer,$(FACTORY),llamafactory,llamafactory$(comma)transformers$(comma)torch)
audit-axolotl: $(TRAINERS)/axolotl/.ready  ## audit axolotl's trainer
	$(call audit,axolotl,axolotl_trainer,causal causal_equal_lengths,axolotl,axolotl$(comma)transformers$(comma)torch)
audit-accelerate-sharded: AUDIT_SIZES := --batch-size 8 --accumulation-steps 4 --processes 2
audit-accelerate-sharded: $(TRAINERS)/transformers/.ready  ## audit accelerate's FSDP2 on two gloo ranks
	$(call audit,transformers,accelerate_sharded,equal clipped unequal,accelerate-sharded,accelerate$(comma)torch)
audit-deepspeed-ranks: AUDIT_SIZES := --batch-size 8 --accumulation-steps 4 --processes 2
audit-deepspeed-ranks: $(TRAINERS)/deepspeed/.ready  ## audit DeepSpeed's ZeRO 2 and 3 on two gloo ranks
	$(call audit,deepspeed,deepspeed_engine,two_ranks_zero_2 two_ranks_zero_3,deepspeed-ranks,deepspeed$(comma)torch)
audit-open-clip: $(TRAINERS)/open-clip/.ready  ## audit open_clip's train_one_epoch
	$(call audit,open-clip,open_clip_epoch,clip_loss clip_loss_clipped clip_loss_remainder sigmoid_loss,open-clip,open_clip_torch$(comma)torch)
audit-pipelining: AUDIT_SIZES := --batch-size 16 --accumulation-steps 4,8
audit-pipelining: $(TRAINERS)/torch/.ready  ## audit torch's pipelining with several calls per optimizer step
	$(call audit,torch,pipelining,scaled not_scaled,pipelining,torch)
audit-rl-objectives: $(TRAINERS)/torch/.ready  ## audit the objectives of reinforcement learning over fixed rollouts
	$(call audit,torch,rl_objectives,$(OBJECTIVES),rl-objectives,torch)
audit-timm: AUDIT_SIZES := --batch-size 16 --accumulation-steps 4,8
audit-timm: $(TRAINERS)/timm/.ready  ## audit a plain loop over models and an optimizer of timm
	$(call audit,timm,timm_loop,vision_transformer residual_group_norm residual_batch_norm drop_path,timm,timm$(comma)torch)
audit-fastai: $(TRAINERS)/fastai/.ready  ## audit fastai
	$(call audit,fastai,fastai_learner,sgd adam torch_clipped remainder,fastai,fastai$(comma)torch)
audit-deepspeed: $(TRAINERS)/deepspeed/.ready  ## audit DeepSpeed's engine on one rank
	$(call audit,deepspeed,deepspeed_engine,$(ENGINE),deepspeed,deepspeed$(comma)torch)
audit-small-engines: $(TRAINERS)/small-engines/.ready  ## audit ignite, poutyne, pytorch-accelerated, torchtnt and skorch
	$(call audit,small-engines,small_engines,ignite_divisible ignite_remainder ignite_unequal,ignite,pytorch-ignite$(comma)torch)
	$(call audit,small-engines,small_engines,poutyne_remainder poutyne_unequal,poutyne,poutyne$(comma)torch)
	$(call audit,small-engines,small_engines,accelerated_divisible accelerated_short_window accelerated_clipped,pytorch-accelerated,pytorch-accelerated$(comma)accelerate$(comma)torch)
	$(call audit,small-engines,small_engines,torchtnt_clipped_scheduled torchtnt_short_window,torchtnt,torchtnt$(comma)torch)
	$(call audit,small-engines,small_engines,skorch_divisible skorch_remainder,skorch,skorch$(comma)torch)
audit-ultralytics: $(TRAINERS)/ultralytics/.ready  ## audit the trainers of ultralytics
	$(call audit,ultralytics,ultralytics_trainer,$(NOMINAL),ultralytics,ultralytics$(comma)torch)
audit-opacus: $(TRAINERS)/opacus/.ready  ## audit opacus
	$(call audit,opacus,opacus_engine,managed managed_noise managed_ghost added added_remainder added_ghost,opacus,opacus$(comma)torch)
audit-flair: $(TRAINERS)/flair/.ready  ## audit flair
	$(call audit,flair,flair_trainer,tagger tagger_crf tagger_adamw tagger_dropout classifier,flair,flair$(comma)torch)
audit-optimizers: $(TRAINERS)/optimizers/.ready  ## audit right loops over optimizers of pytorch_optimizer and schedulefree
	$(call audit,optimizers,optimizer_zoo,$(ZOO),optimizers,pytorch_optimizer$(comma)schedulefree$(comma)torch)
audit-replicas: $(VENV)/.ready  ## audit DDP and FSDP2 on two gloo ranks
	$(BIN)/python -m pytest -q -m "" tests/audit/test_ranks.py
